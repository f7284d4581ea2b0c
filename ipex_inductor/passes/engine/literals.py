"""What a graph of Dynamo's, or of torch.export, makes of constants alone: the value, now.

Such graphs write to tensors in place, and name what they call in many ways, so all that may take
part is listed. `constants` does the same on AOT autograd's graphs, which write nothing.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.node import map_aggregate

from ipex_inductor import compat
from ipex_inductor.passes.engine.source import ATTENTION

Node = torch.fx.Node

LARGEST = 1 << 24  # elements of what is computed, not counting dimensions that are only expanded
CPU = torch.device("cpu")


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Functions, methods and ops of these names: none writes to what it is given, and none is rounded
# otherwise on another device.
MADE = _names("arange eye full ones scalar_tensor tensor zeros")
LIKE = _names(  # in the dtype or of the sizes of a tensor, whatever its values
    "full_like new_full new_ones new_zeros ones_like zeros_like"
)
COMPUTED = _names(
    "abs add all and and_ any bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clone",
    "cumsum diff eq ge gt invert le logical_and logical_not logical_or logical_xor lt masked_fill",
    "maximum minimum mul ne neg or or_ rsub stack sub sum tril triu where xor",
)
VIEWED = _names(  # perhaps the same memory
    "bfloat16 bool broadcast_to contiguous detach double expand expand_as flatten float getitem",
    "half int long permute reshape select slice squeeze t to transpose type type_as unsqueeze",
    "view view_as",
)
COUNTED = _names("arange cumsum sum")  # the same on all devices for whole numbers alone
KNOWN = MADE | LIKE | COMPUTED | VIEWED
# What else may be given a constant, and does not write to it.
READERS = (torch.nn.functional.embedding, *ATTENTION)


class Refused(Exception):
    """Why nothing is known of a value: the text is the reason."""


def example(node: Any) -> Any:
    """The fake tensor that Dynamo or torch.export kept of a node; None of what is none."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None


def value(node: Node, known: dict[Node, Tensor]) -> Tensor:
    """What `node` is, on the CPU; one element of each dimension that it is only expanded in.

    `known` keeps what was computed. Raises `Refused` for what may be another at another call, or on
    another device, or is too large.
    """
    with unset_fake_temporarily(), torch.no_grad():
        whole = _computed(node, known)
        return whole[tuple(slice(None if step else 1) for step in whole.stride())]


def _computed(node: Node, known: dict[Node, Tensor]) -> Tensor:
    if node not in known:
        name, fake = called(node), example(node)
        _check_kind(node, name)
        _check_sizes(fake)
        given, named = map_aggregate(
            (node.args, node.kwargs),
            lambda part: _argument(part, name, fake, known),
        )
        _check_exact(node, name, fake, given)
        _check_unwritten(node)
        if name in MADE | LIKE:
            named = {**named, "device": CPU}
        target: Any = node.target
        call = getattr(type(given[0]), target) if node.op == "call_method" else target
        try:
            made = call(*given, **named)
        except Exception as error:
            raise Refused(f"its value is not computed: {error}") from error
        if (made.shape, made.dtype, made.device) != (fake.shape, fake.dtype, CPU):
            raise Refused(f"{name} gives something else than Dynamo saw")
        known[node] = made
    return known[node]


def _argument(part: Any, name: str, fake: Tensor, known: dict[Node, Tensor]) -> Any:
    """An argument of `name`, whose result is `fake`, on the CPU."""
    if isinstance(part, (str, torch.device)):  # no other words are among what is listed
        return CPU
    if not isinstance(part, Node):
        return part
    if not isinstance(example(part), Tensor):
        raise Refused(f"{part.name} is a size")
    if name not in LIKE:
        return _computed(part, known)
    shape = tuple(fake.shape) if name.endswith("_like") else ()
    return torch.empty(shape, dtype=example(part).dtype, device="meta")


def called(node: Node) -> str:
    """The name of torch's by which a node is called; "" for what is not torch's."""
    target = node.target
    if node.op == "call_method":
        name = str(target)
        return name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__ if target.namespace == "aten" else ""
    name = getattr(target, "__name__", "")
    torchs = getattr(torch, name, None), getattr(operator, name, None)
    return name if node.op == "call_function" and target in torchs else ""


def _check_kind(node: Node, name: str) -> None:
    if node.op == "placeholder":
        raise Refused(f"it comes of input {compat.callers_name(node) or node.name}")
    if name not in KNOWN or "out" in node.kwargs or "alpha" in node.kwargs:
        raise Refused(f"it comes of {name or node.name}")


def _check_sizes(fake: Any) -> None:
    if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided or fake.is_nested:
        raise Refused("it comes of what is no plain tensor")
    if any(isinstance(size, torch.SymInt) for size in (*fake.shape, *fake.stride())):
        raise Refused("its sizes vary")
    steps = zip(fake.shape, fake.stride(), strict=True)
    if math.prod(size for size, step in steps if step) > LARGEST:
        raise Refused(f"it has more than {LARGEST} elements")


def _check_exact(node: Node, name: str, fake: Tensor, given: Any) -> None:
    """Raise `Refused` where devices may differ: fractions counted up, or made whole numbers."""
    whole = not (fake.is_floating_point() or fake.dtype is torch.bool)
    fractions = any(isinstance(part, Tensor) and part.is_floating_point() for part in given)
    if (name in COUNTED and not whole) or (whole and fractions and name not in LIKE):
        raise Refused(f"{node.name} may differ by device")


def _check_unwritten(node: Node) -> None:
    """Raise `Refused` where something may write to the memory of a node's value."""
    for user in node.users:
        if user.op == "output" or (user.target in READERS and "max_norm" not in user.kwargs):
            continue
        name = called(user)
        if name not in KNOWN or "out" in user.kwargs:
            raise Refused(f"{name or user.name} may write to it")
        if name in VIEWED:
            _check_unwritten(user)
