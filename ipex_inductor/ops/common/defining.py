"""Registration of the `ipex::` ops with torch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

_library: Any = torch.library.Library("ipex", "FRAGMENT")  # type: ignore[no-untyped-call]


class Arguments(SimpleNamespace):
    """Arguments of a call by their names in the op's schema."""


def op(name: str) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Return a decorator that registers a function as op `ipex::<name>`, which mutates no argument.

    All ops are registered from this one file: torch looks up the source of the file that defines an
    op, which takes 4 ms for each new file, in all modules.
    """

    def define(function: Callable[..., object]) -> CustomOpDef:
        return torch.library.custom_op(f"ipex::{name}", function, mutates_args=())

    return define


def mutable_op(
    schema: str, fake_of: Callable[..., object]
) -> Callable[[Callable[..., object]], Callable[..., Any]]:
    """Return a decorator that registers a function as an op which writes some of its arguments.

    It counts no version of what it writes, and CUDA graphs leave it out.

    Args:
        schema: the op's, without its namespace.
        fake_of: its fake.
    """
    return light_op(schema, fake_of, (torch.Tag.cudagraph_unsafe,))


def light_op(
    schema: str, fake_of: Callable[..., object], tags: tuple[torch.Tag, ...] = ()
) -> Callable[[Callable[..., object]], Callable[..., Any]]:
    """Return a decorator that registers a function as an op without Python code for autograd.

    A call costs a third of the host's time of one that `op` registers. It has no gradient.

    Args:
        schema: the op's, without its namespace.
        fake_of: its fake.
        tags: of the op.
    """
    name = schema.partition("(")[0]

    def define(function: Callable[..., object]) -> Callable[..., Any]:
        _library.define(schema, tags=tags)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ipex::{name}", fake_of, lib=_library)
        overload: Callable[..., Any] = getattr(torch.ops.ipex, name).default
        return overload

    return define


def implement_on_cpu(name: str, function: Callable[..., object]) -> None:
    """Register a function as the implementation of op `ipex::<name>` of `light_op` on CPUs."""
    _library.impl(name, function, "CPU")


def fake(defined: CustomOpDef) -> Callable[[Callable[[Arguments], object]], None]:
    """Return a decorator that registers a function of an op's arguments by name as its fake.

    The fake of `ipex::linear` reads `call.weight`, and does not repeat the schema.
    """

    def register(function: Callable[[Arguments], object]) -> None:
        @defined.register_fake
        def _(*args: Any, **named: Any) -> object:
            return function(name_arguments(defined._opoverload, args, named))

    return register


def name_arguments(
    overload: torch._ops.OpOverload, args: Sequence[Any], named: Mapping[str, Any]
) -> Arguments:
    """Return the arguments of a call of `overload` by their names in its schema, with defaults."""
    names, defaults = _read_schema(overload)
    return Arguments(**{**defaults, **dict(zip(names, args, strict=False)), **named})


@functools.cache  # reading a schema takes tens of microseconds; SYCL ops do so at each call
def _read_schema(overload: torch._ops.OpOverload) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an op's arguments, and the defaults of those that have one."""
    schema = overload._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return [argument.name for argument in schema], defaults
