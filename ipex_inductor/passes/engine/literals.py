"""Values that a graph of Dynamo's or of torch.export computes from constants alone.

Such graphs write to tensors in place, and name their calls in many ways, so all calls that may take
part are listed. `constants` serves AOT autograd's graphs, which write nothing.
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

LARGEST = 1 << 24  # the most elements of a computed value, without expanded dimensions
CPU = torch.device("cpu")


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Names of functions, methods and ops that write to no argument, and that round alike on all
# devices.
MADE = _names("arange eye full ones scalar_tensor tensor zeros")
LIKE = _names(  # take dtype or sizes of a tensor, but not its values
    "full_like new_full new_ones new_zeros ones_like zeros_like"
)
COMPUTED = _names(
    "abs add all and and_ any bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clone",
    "cumsum diff eq ge gt invert le logical_and logical_not logical_or logical_xor lt masked_fill",
    "maximum minimum mul ne neg or or_ rsub stack sub sum tril triu where xor",
)
VIEWED = _names(  # may share memory with the argument
    "bfloat16 bool broadcast_to contiguous detach double expand expand_as flatten float getitem",
    "half int long permute reshape select slice squeeze t to transpose type type_as unsqueeze",
    "view view_as",
)
COUNTED = _names("arange cumsum sum")  # equal on all devices for integers only
KNOWN = MADE | LIKE | COMPUTED | VIEWED
# Other functions that may take a constant, and do not write to it.
READERS = (torch.nn.functional.embedding, *ATTENTION)


class Refused(Exception):
    """Raised with the reason why a value is not known."""


def example(node: Any) -> Any:
    """Return the fake tensor that Dynamo or torch.export stored for a node, or None."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None


def value(node: Node, constants: dict[Node, Tensor]) -> Tensor:
    """Return the value of `node` on the CPU, with one element along each expanded dimension.

    Raises `Refused` for a value that may differ at another call or on another device, or is too
    large.

    Args:
        node: The node.
        constants: The values computed so far; gets the new ones.
    """
    with unset_fake_temporarily(), torch.no_grad():
        whole = _compute(node, constants)
        return whole[tuple(slice(None if step else 1) for step in whole.stride())]


def _compute(node: Node, constants: dict[Node, Tensor]) -> Tensor:
    if node not in constants:
        name, fake = torch_name(node), example(node)
        _check_kind(node, name)
        _check_sizes(fake)
        args, kwargs = map_aggregate(
            (node.args, node.kwargs),
            lambda part: _argument(part, name, fake, constants),
        )
        _check_exact(node, name, fake, args)
        _check_unwritten(node)
        if name in MADE | LIKE:
            kwargs = {**kwargs, "device": CPU}
        target: Any = node.target
        call = getattr(type(args[0]), target) if node.op == "call_method" else target
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            raise Refused(f"its value is not computed: {error}") from error
        if (result.shape, result.dtype, result.device) != (fake.shape, fake.dtype, CPU):
            raise Refused(f"{name} gives something else than Dynamo saw")
        constants[node] = result
    return constants[node]


def _argument(part: Any, name: str, fake: Tensor, constants: dict[Node, Tensor]) -> Any:
    """Return an argument of the call `name`, whose result is `fake`, on the CPU."""
    if isinstance(part, (str, torch.device)):  # no listed call takes other strings
        return CPU
    if not isinstance(part, Node):
        return part
    if not isinstance(example(part), Tensor):
        raise Refused(f"{part.name} is a size")
    if name not in LIKE:
        return _compute(part, constants)
    shape = tuple(fake.shape) if name.endswith("_like") else ()
    return torch.empty(shape, dtype=example(part).dtype, device="meta")


def torch_name(node: Node) -> str:
    """Return torch's name of what a node calls; "" for what is not torch's."""
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
        raise Refused("it is computed from something other than a plain tensor")
    if any(isinstance(size, torch.SymInt) for size in (*fake.shape, *fake.stride())):
        raise Refused("its sizes vary")
    steps = zip(fake.shape, fake.stride(), strict=True)
    if math.prod(size for size, step in steps if step) > LARGEST:
        raise Refused(f"it has more than {LARGEST} elements")


def _check_exact(node: Node, name: str, fake: Tensor, args: Any) -> None:
    """Raise `Refused` where devices may differ: sums of fractions, or fractions made integers."""
    whole = not (fake.is_floating_point() or fake.dtype is torch.bool)
    fractions = any(isinstance(part, Tensor) and part.is_floating_point() for part in args)
    if (name in COUNTED and not whole) or (whole and fractions and name not in LIKE):
        raise Refused(f"{node.name} may differ by device")


def _check_unwritten(node: Node) -> None:
    """Raise `Refused` if something may write to the memory of a node's value."""
    for user in node.users:
        if user.op == "output" or (user.target in READERS and "max_norm" not in user.kwargs):
            continue
        name = torch_name(user)
        if name not in KNOWN or "out" in user.kwargs:
            raise Refused(f"{name or user.name} may write to it")
        if name in VIEWED:
            _check_unwritten(user)
