"""Find nodes of a graph that compute a product of oneDNN's, on a weight that it can pack.

A product with a number that varies with sizes is left out: neither its kernel nor the layout of its
weight can be chosen.
"""

import functools
import operator
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cached_primitives

Node = torch.fx.Node
T = TypeVar("T")
aten, ipex, mkldnn = torch.ops.aten, torch.ops.ipex, torch.ops.mkldnn

# Their results serve one reader, and most are opaque: they may only run in the prologue.
PACKERS = (
    mkldnn._reorder_linear_weight.default,
    mkldnn._reorder_convolution_weight.default,
    mkldnn._reorder_convolution_transpose_weight.default,
    ipex.blocks.default,
    ipex.winograd_weight.default,
    cached_primitives.KEPT_WEIGHT,
)
_besides: ContextVar[frozenset[torch.dtype]] = ContextVar("besides", default=frozenset())


# Why products could not be packed, by node; if unset, errors are raised.
_failures: ContextVar[dict[Node, str] | None] = ContextVar("failures", default=None)


@contextmanager
def sparing(report: GraphReport) -> Iterator[None]:
    """Leave a product whose packing fails inside as it is; `report` gets the reason."""
    failures: dict[Node, str] = {}
    token = _failures.set(failures)
    try:
        yield
    finally:
        _failures.reset(token)
        for node, reason in failures.items():
            report.add("missed", "packed weights", f"it failed: {reason}", user_line(node))


def attempt(node: Node, work: Callable[[], T]) -> T | None:
    """Return what `work` for the product `node` returns; None if it fails inside `sparing`."""
    try:
        return work()
    except Exception as error:
        failures = _failures.get()
        if failures is None:
            raise
        failures[node] = f"{type(error).__name__}: {error}"
        return None


@dataclass(frozen=True)
class Product:
    """A node seen as an `ipex` op: the arguments it would have, and its weight before packing."""

    op: Any
    weight: Node
    shape: tuple[int, ...]  # of the packed weight
    args: Callable[[Node], tuple[Any, ...]]  # of the packed weight
    pack: Callable[[torch.fx.Graph], Node]
    strides: tuple[int, ...] = ()  # of the packed weight; empty for oneDNN's opaque layout
    dtype: torch.dtype | None = None  # of the packed weight, if it differs


def onednn_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes in which this CPU's oneDNN has products (fp64 has none)."""
    return _onednn_dtypes(architecture())


@functools.cache
def _onednn_dtypes(_: str) -> frozenset[torch.dtype]:
    supported = {torch.float32}
    if mkldnn._is_mkldnn_bf16_supported():
        supported.add(torch.bfloat16)
    if mkldnn._is_mkldnn_fp16_supported():
        supported.add(torch.float16)
    return frozenset(supported)


@contextmanager
def also_in(dtypes: frozenset[torch.dtype]) -> Iterator[None]:
    """Accept products in these dtypes too inside; kernels other than oneDNN's serve them."""
    token = _besides.set(dtypes)
    try:
        yield
    finally:
        _besides.reset(token)


def why_not(*values: Any) -> str | None:
    """Return why oneDNN has no kernel for these tensors (x, weight, bias ...), None when it has."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    first = tensors[0]
    backend: Any = torch.backends.mkldnn
    if not (backend.is_available() and backend.enabled):
        return "oneDNN is switched off (torch.backends.mkldnn)"
    if first.device.type != "cpu":
        return f"no fused kernel for {first.device.type} yet: Inductor's kernel is used"
    dtypes = onednn_dtypes() | _besides.get()
    if first.dtype not in dtypes or any(v.dtype != first.dtype for v in tensors):
        return f"oneDNN has no kernel for {', '.join(str(v.dtype) for v in tensors)} on this CPU"
    if any(isinstance(size, int) and size == 0 for v in tensors for size in v.shape):
        return "a size is zero"
    return None


def why_not_linear(x: Any, weight: Any, bias: Any, other: Any = None) -> str | None:
    """Return why oneDNN has no linear kernel for these tensors, None when it has."""
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        return f"an addend of shape {tuple(bias.shape)} is no bias of {weight.shape[0]} elements"
    return why_not(x, weight, bias, other)


def why_not_conv(
    x: Any,
    weight: Any,
    bias: Any,
    other: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: Any,
    output_padding: Any,
    groups: Any,
) -> str | None:
    """Return why oneDNN has no convolution kernel for these arguments, None when it has.

    Args:
        x: The input [batch, channels, ...].
        weight: The weight, in torch's layout.
        bias: The bias, or None.
        other: The addend, or None.
        stride: The stride along each dimension.
        padding: The padding along each dimension.
        dilation: The dilation along each dimension.
        transposed: Whether the convolution is transposed.
        output_padding: The output padding of a transposed convolution.
        groups: The number of groups.
    """
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if reason := find_symbols(**window, output_padding=output_padding):
        return reason
    if x.dim() != weight.dim():
        return "the input has no batch dimension"
    if transposed and x.dim() == 3:
        return "oneDNN's transposed convolution is over two or three dimensions"
    if transposed and groups > 1 and weight.shape[1] == 1:
        return "oneDNN has no depthwise transposed convolution"
    if transposed and any(map(operator.ge, output_padding, stride)):
        return "oneDNN wants an output padding below the stride"
    return why_not(x, weight, bias, other)


def is_transpose(node: Node) -> bool:
    """Return whether `node` is the transpose of a matrix."""
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def find_symbols(**arguments: Any) -> str | None:
    """Return a reason against numbers that vary with sizes, None if all numbers are known.

    A symbol is a `torch.SymInt`, or a node that stands for one: comparing the former would add a
    guard, comparing the latter fails.
    """
    for name, value in arguments.items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(n, (Node, torch.SymInt, torch.SymFloat)) for n in numbers):
            return f"its {name.replace('_', ' ')} varies with sizes"
    return None


def varies(node: Node) -> str | None:
    """Return a reason if a number among the arguments of `node` varies with sizes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    arguments = {a.name: value for a, value in zip(schema, node.args, strict=False)}
    tensors = {a.name for a in schema if "Tensor" in str(a.type)}
    return find_symbols(**{name: value for name, value in arguments.items() if name not in tensors})


def packable(graph: torch.fx.Graph, weights: Container[Node]) -> Iterator[tuple[Node, Product]]:
    """Yield the products that oneDNN has and whose weight is among `weights`."""
    for node in list(graph.nodes):
        read = READERS.get(node.target) if node.op == "call_function" else None
        product = read(node) if read else None
        if product is not None and product.weight in weights and _is_static(product.weight):
            yield node, product


def _is_static(node: Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, Node) else node


def _addmm(node: Node) -> Product | None:
    if node.kwargs:  # beta, alpha
        return None
    bias, x, transposed = node.args
    return _transposed_product(x, transposed, bias)


def _mm(node: Node) -> Product | None:
    x, transposed = node.args
    return _transposed_product(x, transposed, None)


NO_EPILOGUE: tuple[Any, ...] = (None, "none", "none", [])  # other, binary, unary, scalars


def _transposed_product(x: Any, transposed: Any, bias: Any) -> Product | None:
    if not is_transpose(transposed):
        return None
    return _linear_product(x, transposed.args[0], bias, *NO_EPILOGUE)


def _ipex_linear(node: Node) -> Product | None:
    *args, packed = node.args
    return None if packed else _linear_product(*args)


def _linear_product(x: Any, weight: Any, bias: Any, *words: Any) -> Product | None:
    if why_not_linear(*map(_value, (x, weight, bias, words[0]))):
        return None
    rows = _known_product(x.meta["val"].shape[:-1])
    return Product(
        ipex.linear.default,
        weight,
        tuple(weight.meta["val"].shape),
        lambda packed: (x, packed, bias, *words, True),
        lambda g: g.call_function(PACKERS[0], (weight, rows)),
    )


def _convolution(node: Node) -> Product | None:
    x, weight, bias, *window = node.args
    return _conv_product(node, x, weight, bias, window, *NO_EPILOGUE)


def _ipex_conv(node: Node) -> Product | None:
    x, weight, bias, addend, *window, binary, unary, scalars, packed = node.args
    if packed:
        return None
    return _conv_product(node, x, weight, bias, window, addend, binary, unary, scalars)


def _conv_product(
    node: Node, x: Any, weight: Any, bias: Any, window: Any, addend: Any, *epilogue: Any
) -> Product | None:
    stride, padding, dilation, transposed, output_padding, groups = settings = window
    values = (_value(x), _value(weight), _value(bias), _value(addend))
    if why_not_conv(*values, *settings):
        return None
    if len(padding) == 1:  # "valid" comes as one zero
        padding = list(padding) * len(stride)
    sizes = list(x.meta["val"].shape)
    static_sizes = sizes if all(isinstance(size, int) for size in sizes) else None
    shape = tuple(weight.meta["val"].shape)
    if transposed:
        if static_sizes is None:
            return None  # oneDNN blocks that weight by the size of the input
        shape = (shape[1] * groups, shape[0] // groups, *shape[2:])
    last = not node.meta["val"].is_contiguous()  # eager's result has one of the two formats
    result = "channels_last" if last else "contiguous"
    window = (stride, padding, dilation, transposed, output_padding, groups)
    geometry = (stride, dilation, groups, static_sizes)
    packer, rest = (
        (PACKERS[2], (padding, output_padding, *geometry))
        if transposed
        else (PACKERS[1], (padding, *geometry))
    )
    return Product(
        ipex.conv.default,
        weight,
        shape,
        lambda packed: (x, packed, bias, addend, *window, *epilogue, result),
        lambda g: g.call_function(packer, (weight, *rest)),
    )


def _known_product(sizes: Any) -> int | None:
    """Return the product of static sizes, None if one is a symbol.

    OneDNN's blocking depends on the product.
    """
    product = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        product *= size
    return product


def _guard(read: Callable[[Node], Product | None]) -> Callable[[Node], Product | None]:
    @functools.wraps(read)
    def read_if_static(node: Node) -> Product | None:
        return None if varies(node) else attempt(node, lambda: read(node))

    return read_if_static


READERS: dict[Any, Callable[[Node], Product | None]] = {
    aten.addmm.default: _guard(_addmm),
    aten.mm.default: _guard(_mm),
    aten.convolution.default: _guard(_convolution),
    ipex.linear.default: _guard(_ipex_linear),
    ipex.conv.default: _guard(_ipex_conv),
}
