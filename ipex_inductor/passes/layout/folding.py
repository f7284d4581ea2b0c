"""Fold batch norms of inference into the convolution or linear layer before or after them.

Batch norm is `x * scale + shift` in each channel, with `scale = gamma / sqrt(var + eps)` and
`shift = beta - mean * scale`. A product absorbs it by work on weights alone, which the prologue
computes in float64, rounded once. In 16 bits on GPUs the errors of rounding are balanced in each
output channel (`ops/pointwise/balanced_rounding.py`).

    product(x, w, b) * scale + shift == product(x, w * scale, b * scale + shift)
    product(x * scale + shift, w, b) == product(x, w * scale, b + sum(w * shift))

In the first line the vectors run along the output channels of w, in the second along its input
channels.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ipex_inductor.passes.engine.products import Product, as_product, product_after, product_before
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

CONVOLUTIONS = tuple(f"conv{n}d" for n in (1, 2, 3))
TRANSPOSED = tuple(f"conv_transpose{n}d" for n in (1, 2, 3))
NAMES = frozenset(
    [f"{product}+batch_norm" for product in (*CONVOLUTIONS, *TRANSPOSED, "linear")]
    + [f"batch_norm+{product}" for product in (*CONVOLUTIONS, "linear")]
)

NORM = aten._native_batch_norm_legit_no_training.default
TRAINING = (  # use the statistics of the batch; only reported
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)
WHOLE = frozenset(op._schema.name.removeprefix("aten::") for op in (NORM, *TRAINING))

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fold_batch_norms(
    graph: torch.fx.Graph,
    weights: Iterable[Node],
    off: Collection[str],
    report: GraphReport,
    balances: bool = False,
) -> None:
    """Fold every batch norm of `graph` where that is proven right; report why for the others.

    Args:
        graph: The graph, changed in place.
        weights: Nodes that hold parameters or buffers, or are computed from them alone.
        off: Names of folds to leave out.
        report: Gets the decisions.
        balances: Whether the errors of weights rounded to 16 bits may be balanced.
    """
    for op in TRAINING:
        for norm in graph.find_nodes(op="call_function", target=op):
            reason = "training mode: it normalises by the statistics of the batch"
            report.add("missed", "batch_norm", reason, user_line(norm))
    folding = _Folding(graph, set(weights), off, report, balances)
    norms = graph.find_nodes(op="call_function", target=NORM)
    remaining = [norm for norm in norms if not folding.into_product_before(norm)]
    for norm in reversed(remaining):  # of two in a row only the last is next to the product
        folding.into_product_after(norm)


class _Folding:
    """The folds of one graph.

    `exact` maps each derived weight to its value before rounding. `fakes` caches the fake results
    of ops by their arguments, as a model repeats its layers.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        weights: set[Node],
        off: Collection[str],
        report: GraphReport,
        balances: bool,
    ) -> None:
        self.graph, self.weights, self.off, self.report = graph, weights, off, report
        self.balances = balances
        self.exact: dict[Node, Node] = {}
        self.fakes: dict[str, torch.Tensor] = {}

    def into_product_before(self, norm: Node) -> bool:
        """Fold `norm` into the product that it normalises, if legal; return whether it was."""
        product, between = product_before(norm)
        if product is None:
            return False
        width = product.width(product.outputs)
        reason = (
            _other_users([product.node, *between])
            or self._unfit(norm, product)
            or _why_misaligned(norm, product.node, width)
        )
        if not self._decide(f"{product.name}+batch_norm", reason, norm):
            return False
        for node in (product.node, *between):  # move to where the statistics are available
            norm.prepend(node)
        build = _Builder(self, product.node)
        scale, shift = _affine(build, norm, width)
        along = _along(build, scale, product, product.outputs)
        if product.bias is not None:
            shift = build.plus(build.times(build.double(product.bias), scale), shift)
        _remove(norm)
        self._rebuild(build, product, build.times(build.double(product.weight), along), shift)
        return True

    def into_product_after(self, norm: Node) -> None:
        """Fold `norm` into the product that reads its result, if that is legal."""
        product, between = product_after(norm)
        if product is None:
            if product_before(norm)[0] is None:
                self.report.add("missed", "batch_norm", _neighbours(norm), user_line(norm))
            return
        width = product.width(product.inputs)
        reason = (
            _other_users(between)
            or self._unfit(norm, product)
            or _why_misaligned(norm, product.x, width)
            or product.uneven
            or _coarse(product.x.meta["val"])
        )
        if not self._decide(f"batch_norm+{product.name}", reason, norm):
            return
        build = _Builder(self, product.node)
        scale, shift = (
            _along(build, v, product, product.inputs) for v in _affine(build, norm, width)
        )
        weight = build.double(product.weight)
        summed = [d for d in range(weight.meta["val"].dim()) if d != product.outputs]
        bias = build(aten.sum.dim_IntList, build.times(weight, shift), summed)
        if product.bias is not None:
            bias = build.plus(build.double(product.bias), bias)
        _remove(norm)
        self._rebuild(build, product, build.times(weight, scale), bias)

    def _unfit(self, norm: Node, product: Product) -> str | None:
        """Return why `norm` cannot be folded into `product` on either side, None if it can."""
        parameters = [n for n in (product.weight, product.bias, *norm.args[1:5]) if n is not None]
        if not all(n in self.weights or n in self.exact for n in parameters):
            return "a weight, bias or statistic is not a parameter or buffer"
        if any(user.args[1] != 0 for user in norm.users):
            return "its saved statistics are used"
        x: Any = norm.args[0]
        return (
            _odd_weights([n.meta["val"] for n in parameters])
            or _no_bias(product)
            or _empty(product.node.meta["val"])
            or _why_changed(x.meta["val"], norm.meta["val"][0])
        )

    def _decide(self, name: str, reason: str | None, norm: Node) -> bool:
        if name in self.off:
            return False
        self.report.add("missed" if reason else "fired", name, reason or "", user_line(norm))
        if reason is None:
            counters["ipex"][name] += 1
        return reason is None

    def _rebuild(self, build: "_Builder", product: Product, weight: Node, bias: Node) -> None:
        """Replace `product` by the product with these weights, rounded to its dtype.

        Args:
            build: Adds nodes before the product.
            product: The product to replace.
            weight: The new weight in float64.
            bias: The new bias in float64.
        """
        dtype = product.weight.meta["val"].dtype
        rounded = [self._round_weight(build, product, weight, dtype), build.cast(bias, dtype)]
        self.exact.update(zip(rounded, (weight, bias), strict=True))
        current = as_product(product.node)  # its x may have been the norm
        assert current is not None
        new = product.again(build, current.x, *rounded)
        new.meta = dict(product.node.meta)
        product.node.replace_all_uses_with(new)
        self.graph.erase_node(product.node)

    def _round_weight(
        self, build: "_Builder", product: Product, weight: Node, dtype: torch.dtype
    ) -> Node:
        """Return the new weight of `product` in its dtype.

        On a CPU balancing takes 15 ns a weight, which a second process would wait for.
        """
        value = weight.meta["val"]
        is_grouped = product.outputs and product.groups > 1  # a slice has channels of all groups
        if not self.balances or dtype.itemsize > 2 or not _balances_on(value.device) or is_grouped:
            return build.cast(weight, dtype)
        return build(torch.ops.ipex.round_balanced.default, weight, dtype, product.outputs)


def _balances_on(device: torch.device) -> bool:
    return device.type != "cpu"


def _affine(build: "_Builder", norm: Node, width: int) -> tuple[Node, Node]:
    """Return scale and shift of `norm` in float64, for each of `width` channels of a product."""
    _, gamma, beta, mean, variance, _, epsilon = norm.args
    scale = build(aten.rsqrt.default, build(aten.add.Tensor, build.double(variance), epsilon))
    if gamma is not None:
        scale = build.times(scale, build.double(gamma))
    shift = build(aten.neg.default, build.times(build.double(mean), scale))
    if beta is not None:
        shift = build.plus(shift, build.double(beta))
    return _spread(build, scale, width), _spread(build, shift, width)


def _spread(build: "_Builder", vector: Node, width: int) -> Node:
    """Return `vector` with each element repeated to a total of `width`."""
    (channels,) = vector.meta["val"].shape
    if channels == width:
        return vector
    column = build(aten.view.default, vector, [channels, 1])
    table = build(aten.repeat.default, column, [1, width // channels])
    return build(aten.view.default, table, [width])


def _along(build: "_Builder", vector: Node, product: Product, dim: int) -> Node:
    """Return `vector`, one element per channel, as a factor of the weight along `dim`."""
    rows, columns, *window = product.weight.meta["val"].shape
    ones = [1] * len(window)
    if dim == 0:
        return build(aten.view.default, vector, [rows, 1, *ones])
    groups = build(aten.view.default, vector, [product.groups, 1, columns])
    table = build(aten.repeat.default, groups, [1, rows // product.groups, 1])
    return build(aten.view.default, table, [rows, columns, *ones])


def _remove(norm: Node) -> None:
    for user in list(norm.users):
        user.replace_all_uses_with(norm.args[0])  # type: ignore[arg-type]
        norm.graph.erase_node(user)
    norm.graph.erase_node(norm)


def _other_users(chain: Sequence[Node]) -> str | None:
    """Return a reason unless each node of `chain` feeds only the next."""
    shared = [node for node in chain if len(node.users) != 1]
    return f"{shared[0].name} has {len(shared[0].users)} users" if shared else None


def _why_misaligned(norm: Node, side: Node, width: int) -> str | None:
    """Return a reason unless each of the `width` channels of `side` lies in one channel of `norm`.

    `side` [rows, width, ...] is the end of the product that faces the norm; reshapes between keep
    the order of elements. With equal rows, channels can then only be split into equal runs.
    """
    normed, product = norm.meta["val"][0].shape, side.meta["val"].shape
    channels = normed[1]
    if statically_known_true(channels == 1):
        return None
    if statically_known_true(normed[0] == product[0]) and width % channels == 0:
        return None
    return f"dimension 1 of {tuple(normed)} does not hold the channels of {tuple(product)}"


def _odd_weights(values: Sequence[torch.Tensor]) -> str | None:
    if any(value.dtype not in FLOATS for value in values):
        return f"weights of {', '.join(str(value.dtype) for value in values)}"
    if not all(isinstance(size, int) for value in values for size in value.shape):
        return "a weight has a dynamic shape"
    return next(filter(None, map(_empty, values)), None)


def _no_bias(product: Product) -> str | None:
    width = product.width(product.outputs)
    if product.bias is None or tuple(product.bias.meta["val"].shape) == (width,):
        return None
    return f"what the product adds is no bias of {width} elements"


def _empty(value: torch.Tensor) -> str | None:
    return "a size is zero" if any(statically_known_true(n == 0) for n in value.shape) else None


def _why_changed(x: torch.Tensor, y: torch.Tensor) -> str | None:
    """Return a reason if batch norm of `x` gives a `y` of another dtype or layout."""
    if x.dtype != y.dtype:
        return f"it converts {x.dtype} to {y.dtype}"
    # The stride of one element does not count.
    pairs = zip(x.shape, x.stride(), y.stride(), strict=True)
    same = all(statically_known_true(n == 1) or statically_known_true(a == b) for n, a, b in pairs)
    return None if same else "it changes the layout"


def _coarse(x: torch.Tensor) -> str | None:
    """Return a reason unless the product of `x` itself is as precise as that of the normalised `x`.

    Where products are rounded more coarsely than batch norm, and a mean is large against its
    deviation, the mean must be subtracted before the product. GPUs may multiply float32 as TF32.
    """
    if x.dtype == torch.float64 or (x.dtype == torch.float32 and x.device.type == "cpu"):
        return None
    return f"a mean far from zero would cost digits in {x.dtype} on {x.device.type}"


def _neighbours(norm: Node) -> str:
    (before,) = norm.args[:1]
    after = [user for result in norm.users for user in result.users]
    return f"no convolution or linear layer is beside it, but {before} and {after}"


class _Builder:
    """Builder of nodes before `place`, with their fake values."""

    def __init__(self, folding: _Folding, place: Node) -> None:
        self._folding, self._place = folding, place

    def __call__(self, op: Any, *args: Any, value: torch.Tensor | None = None) -> Node:
        """Return a new node `op(*args)`; `value` is its fake value if that is known."""
        graph = self._folding.graph
        with graph.inserting_before(self._place):
            node = graph.call_function(op, args)
        node.meta["val"] = self._fake(op, args) if value is None else value
        return node

    def _fake(self, op: Any, args: Any) -> torch.Tensor:
        values = torch.fx.map_arg(args, lambda n: n.meta["val"])
        facts = id if op.is_view else _facts  # a view shares the memory of its own origin
        key = repr((op, [facts(v) if isinstance(v, torch.Tensor) else v for v in values]))
        if key not in self._folding.fakes:
            with V.fake_mode:
                self._folding.fakes[key] = op(*values)
        return self._folding.fakes[key]

    def times(self, a: Node, b: Node) -> Node:
        """Return `a * b`."""
        return self(aten.mul.Tensor, a, b)

    def plus(self, a: Node, b: Node) -> Node:
        """Return `a + b`."""
        return self(aten.add.Tensor, a, b)

    def cast(self, node: Any, dtype: torch.dtype) -> Node:
        """Return `node` in another dtype."""
        return self(torch.ops.prims.convert_element_type.default, node, dtype)

    def double(self, node: Any) -> Node:
        """Return `node` in float64; for a weight of another fold its value before rounding."""
        return self._folding.exact.get(node) or self.cast(node, torch.float64)


def _facts(value: torch.Tensor) -> tuple[Any, ...]:
    """Return all that the fake result of an op on `value` depends on."""
    return value.dtype, value.device, tuple(value.shape), value.stride()
