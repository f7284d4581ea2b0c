"""Cases from torch's lists: an op or module, a dtype, and the way it is used.

The lists ship in torch's wheel. `common_methods_invocations.op_db` has an OpInfo per operator,
`foreach_*_db` one per horizontal operator, and `common_modules.module_db` a ModuleInfo per layer.
"""

import contextlib
import functools
import itertools
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# inference: every tensor is an input; weights: all but the first are buffers of a module, which is
# what our rules and the weight preprocessing look for; in place: the operator's in-place form;
# training: forward and backward, with parameters where `weights` has buffers.
WAYS = ("inference", "weights", "in place", "training")
HERE = Path(__file__).parent


@dataclass(frozen=True, order=True)
class Case:
    """One row of the suite: `kind` is the list it comes from (op, foreach or module)."""

    kind: str
    name: str
    dtype: str
    way: str

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.way.replace(' ', '_')}"


@dataclass
class Sample:
    """One call of `function`, of which some tensors are inputs and the others are held.

    Args:
        given: how many of the first tensors are inputs although the others are parameters (if they
            require a gradient) and buffers of a module; None: all are inputs.
        differentiate: picks what of a result has a gradient worth testing.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: int | None = None
    differentiate: Callable[[Any], Any] = lambda result: result

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it is called with."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    @property
    def holds(self) -> bool:
        """Whether some tensors are held."""
        return self.given is not None and len(self.tensors) > self.given

    def widen(self) -> None:
        """Turn every tensor and dtype into float64 or complex128, for an exact reference."""
        self.args, self.kwargs = tree_map(_widen, (self.args, self.kwargs))
        if not isinstance(self.function, nn.Module):
            return
        for module in self.function.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = nn.Parameter(_widen(value), value.requires_grad)
            for name, value in module._buffers.items():
                module._buffers[name] = _widen(value)


class Together(nn.Module):
    """Samples as one function, whose text is a line a sample: `f0(i0, self.held1, c2, dim=c3)`.

    Straight code is what Dynamo traces fastest, and a graph break leaves the other lines alone.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.inputs_of: list[list[Tensor]] = []
        self.held_of: list[dict[str, Tensor]] = []
        self.names: dict[str, Any] = {}
        lines = [self._line(number, sample) for number, sample in enumerate(samples)]
        given = "".join(f", i{number}" for number in range(len(self.inputs)))
        results = "".join(f"r{number}, " for number in range(len(lines)))
        body = "\n    ".join([*lines, f"return ({results})"])
        exec(f"def run(self{given}):\n    {body}", self.names)
        self.run = self.names["run"]

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)

    def _line(self, number: int, sample: Sample) -> str:
        self.inputs_of.append([])
        self.held_of.append({})
        called = f"f{number}"
        if isinstance(sample.function, nn.Module):
            setattr(self, called, sample.function)
            named = (*sample.function.named_parameters(), *sample.function.named_buffers())
            self.held_of[-1].update(named)
            called = f"self.{called}"
        else:
            self.names[called] = sample.function
        name = functools.partial(self._name, sample)
        args = [_text(value, name) for value in sample.args]
        args += [f"{key}={_text(value, name)}" for key, value in sample.kwargs.items()]
        return f"r{number} = {called}({', '.join(args)})"

    def _name(self, sample: Sample, leaf: Any) -> str:
        """Return what stands for a leaf of the arguments: an input, a held tensor, a constant."""
        if not isinstance(leaf, Tensor):
            name = f"c{len(self.names)}"
            self.names[name] = leaf
            return repr(leaf) if leaf is None or type(leaf) in (bool, int, str) else name
        if sample.given is None or len(self.inputs_of[-1]) < sample.given:
            leaf = leaf.detach().requires_grad_(leaf.requires_grad)
            self.inputs_of[-1].append(leaf)
            self.inputs.append(leaf)
            return f"i{len(self.inputs) - 1}"
        name = f"held{len(self.held_of) - 1}_{len(self.held_of[-1])}"
        if leaf.requires_grad:
            self.register_parameter(name, nn.Parameter(leaf.detach()))
        else:
            self.register_buffer(name, leaf)
        self.held_of[-1][f"held {len(self.held_of[-1])}"] = getattr(self, name)
        return f"self.{name}"  # the other name is the same in every group


def _text(value: Any, name: Callable[[Any], str]) -> str:
    if type(value) in (list, tuple):
        inner = "".join(f"{_text(one, name)}, " for one in value)
        return f"[{inner}]" if type(value) is list else f"({inner})"
    if type(value) is dict:
        inner = "".join(f"{key!r}: {_text(one, name)}, " for key, one in value.items())
        return f"{{{inner}}}"
    return name(value)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            wide = torch.complex128 if value.is_complex() else torch.float64
            return value.detach().to(wide).requires_grad_(value.requires_grad)
        return value
    return torch.float64 if value in (torch.float32, torch.bfloat16) else value


@functools.cache
def entries() -> dict[tuple[str, str], Any]:
    """Return torch's entries by list and name; to import them takes seconds."""
    from torch.testing._internal import common_methods_invocations as invocations
    from torch.testing._internal.common_modules import module_db

    # Random operators are called under a seed of the list's own, which is no part of a graph. The
    # generator is seeded around each call instead (see `check.py`).
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    lists = {name: value for name, value in vars(invocations).items() if name.endswith("_db")}
    foreach = [op for name, ops in lists.items() if name.startswith("foreach_") for op in ops]
    entries: dict[tuple[str, str], Any] = {("module", info.name): info for info in module_db}
    for kind, infos in (("op", invocations.op_db), ("foreach", foreach)):
        for info in infos:
            variant = f".{info.variant_test_name}" if info.variant_test_name else ""
            entries[kind, info.name + variant] = info
    return entries


@functools.cache
def every() -> tuple[Case, ...]:
    """Return all cases, in a stated order, without those that `excluded.toml` names."""
    cases = [
        Case(kind, name, dtype, way)
        for (kind, name), info in entries().items()
        for way in WAYS
        for dtype in DTYPES
        if _has(kind, info, DTYPES[dtype], way)
    ]
    return tuple(case for case in cases if not why_excluded(case))


def _has(kind: str, info: Any, dtype: torch.dtype, way: str) -> bool:
    if kind == "module":
        return way in ("inference", "training")  # in bf16 too, where eager has it
    if way == "training":
        return info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    if way == "in place" and info.get_inplace() is None:
        return False
    return info.supports_dtype(dtype, "cpu")


@functools.cache
def table(name: str) -> tuple[dict[str, Any], ...]:
    """Return the rows of one of the tables beside this file."""
    return tuple(tomllib.loads((HERE / f"{name}.toml").read_text())["row"])


def row_of(case: Case, name: str) -> dict[str, Any] | None:
    """Return the row of a table that speaks of the case: what a row leaves out holds for all."""
    version = Version(torch.__version__).base_version  # nightly builds are of the next release
    for row in table(name):
        if version not in SpecifierSet(row.get("torch", "")):
            continue
        given = row.get("dtypes", [case.dtype]), row.get("ways", [case.way])
        if case.name in row["names"] and case.dtype in given[0] and case.way in given[1]:
            return row
    return None


def why_excluded(case: Case) -> str | None:
    """Return why a case is no test of a compiler, None if it is one."""
    row = row_of(case, "excluded")
    return row["reason"] if row else None


def samples(case: Case) -> list[Sample]:
    """Build the first samples of a case anew: same values, strides and views each time."""
    torch.manual_seed(0)
    info = entries()[case.kind, case.name]
    make = _of_module if case.kind == "module" else _of_op
    with torch.no_grad(), contextlib.suppress(StopIteration):
        return list(itertools.islice(make(info, DTYPES[case.dtype], case.way), SAMPLES))
    return []


def _of_op(info: Any, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    function = info.get_inplace() if way == "in place" else info.get_op()
    made_by_torch = info.sample_inputs("cpu", dtype, requires_grad=way == "training")
    for made in itertools.islice(made_by_torch, 10 * SAMPLES):
        if way == "in place" and made.broadcasts_input:
            continue
        args, given = (made.input, *made.args), None
        if way in ("weights", "training"):
            given = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(made.input))
        sample = Sample(function, args, dict(made.kwargs), given, made.output_process_fn_grad)
        if way != "weights" or sample.holds:  # else `inference` is the same
            yield sample


def _of_module(info: Any, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    training = way == "training"
    made = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=training, training=training
    )
    for entry in made:
        if entry.forward_input is None:
            continue
        built, given = entry.constructor_input, entry.forward_input
        module = info.module_cls(*built.args, **built.kwargs).to(dtype).train(training)
        if info.is_lazy:  # its parameters are made by a first call
            module(*given.args, **given.kwargs)
        yield Sample(module, tuple(given.args), dict(given.kwargs))


def tolerances(case: Case) -> tuple[float, float]:
    """Return (rtol, atol): torch.testing's of the dtype, or the loosest that torch's entry has."""
    from torch.testing._internal.common_device_type import tol, toleranceOverride
    from torch.testing._internal.opinfo.core import DecorateInfo

    dtype = DTYPES[case.dtype]
    rtol, atol = torch.testing._comparison.default_tolerances(dtype)
    given = [tol(atol, rtol)]
    for decorator in entries()[case.kind, case.name].decorators or ():
        inner = [decorator]
        if isinstance(decorator, DecorateInfo):
            elsewhere = decorator.device_type not in (None, "cpu")
            inner = [] if elsewhere else decorator.decorators
        given += [d.d[dtype] for d in inner if isinstance(d, toleranceOverride) and dtype in d.d]
    return max(one.rtol for one in given), max(one.atol for one in given)


def clone(values: Any) -> Any:
    """Return copies that no later write reaches, with the strides they had."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone(memory_format=torch.preserve_format)

    return tree_map(copy, values)
