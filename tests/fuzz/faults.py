"""Seeded faults: one edit of one function of the passes each, which the fuzzer must notice.

An edit is a piece of source text and what stands there instead; a function that no longer holds
that text exactly once is an error, so the table cannot rot.
"""

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from fuzz import twin
from fuzz.program import Program
from ipex_inductor.passes import rule


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in the function `target`, a "module:qualname" of `ipex_inductor`."""

    name: str
    target: str
    old: str
    new: str
    retrace: bool = False  # it changes how patterns are built, which is cached

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """The package with this fault in it."""
        function = _function(self.target)
        whole = function.__code__
        if self.retrace:
            rule.matcher.cache_clear()
        function.__code__ = _edited(function, self.old, self.new)
        try:
            yield
        finally:
            function.__code__ = whole
            if self.retrace:
                rule.matcher.cache_clear()


def killed_by(fault: Fault | None, programs: Sequence[tuple[Program, twin.Captured]]) -> int | None:
    """How many programs it took until one was judged wrong; None if none was."""
    with fault.seeded() if fault else nullcontext():
        for number, (program, captured) in enumerate(programs, 1):
            try:
                twin.judge_inference(program, captured, twin.Verdict())
            except Exception:  # a wrong value, or a pass or graph that no longer runs
                return number
    return None


def _function(target: str) -> Any:
    module, _, qualname = target.partition(":")
    found: Any = importlib.import_module(f"ipex_inductor.{module}")
    for name in qualname.split("."):
        found = getattr(found, name)
    return inspect.unwrap(getattr(found, "_init_fn", found))


def _edited(function: Callable[..., Any], old: str, new: str) -> Any:
    """The code of `function` with `old`, which it holds exactly once, replaced by `new`."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{function.__qualname__} holds {source.count(old)} times: {old}")
    start = source.index("def ")
    code = compile(source[start:].replace(old, new), inspect.getfile(function), "exec")
    (found,) = (c for c in code.co_consts if getattr(c, "co_name", "") == function.__name__)
    if found.co_freevars != function.__code__.co_freevars:
        raise LookupError(f"{function.__qualname__} closes over other names: {old}")
    return found


FOLDING = "passes.folding:"
PRODUCTS = "passes.products:"
RULE = "passes.rule:"
EPILOGUE = "passes.epilogue:"
PACKING = "passes.packing:"
SHARED = "passes.shared_input:"

FAULTS = (
    # Batch norm folding: the arithmetic
    Fault(
        "epsilon dropped",
        FOLDING + "_affine",
        "build.double(variance), epsilon",
        "build.double(variance), 0.0",
    ),
    Fault(
        "epsilon doubled",
        FOLDING + "_affine",
        "build.double(variance), epsilon",
        "build.double(variance), 2 * epsilon",
    ),
    Fault(
        "variance not rooted", FOLDING + "_affine", "aten.rsqrt.default", "aten.reciprocal.default"
    ),
    Fault("gamma dropped", FOLDING + "_affine", "if gamma is not None", "if False"),
    Fault("beta dropped", FOLDING + "_affine", "if beta is not None", "if False"),
    Fault("mean's sign flipped", FOLDING + "_affine", "aten.neg.default", "aten.positive.default"),
    Fault(
        "mean not scaled",
        FOLDING + "_affine",
        "build.times(build.double(mean), scale)",
        "build.double(mean)",
    ),
    Fault(
        "mean and variance swapped",
        FOLDING + "_affine",
        "mean, variance, _, epsilon = norm.args",
        "variance, mean, _, epsilon = norm.args",
    ),
    Fault("gamma and beta swapped", FOLDING + "_affine", "gamma, beta, mean", "beta, gamma, mean"),
    Fault(
        "bias lost before a norm",
        FOLDING + "_Folding.into_product_before",
        "if product.bias is not None",
        "if False",
    ),
    Fault(
        "bias not scaled",
        FOLDING + "_Folding.into_product_before",
        "build.times(build.double(product.bias), scale)",
        "build.double(product.bias)",
    ),
    Fault(
        "bias lost behind a norm",
        FOLDING + "_Folding.into_product_after",
        "if product.bias is not None",
        "if False",
    ),
    Fault(
        "weight scaled along its inputs",
        FOLDING + "_Folding.into_product_before",
        "_along(build, scale, product, product.outputs)",
        "_along(build, scale, product, product.inputs)",
    ),
    Fault(
        "shift summed over the outputs",
        FOLDING + "_Folding.into_product_after",
        "if d != product.outputs",
        "if d != product.inputs",
    ),
    Fault(
        "shift of the scaled weight",
        FOLDING + "_Folding.into_product_after",
        "build.times(weight, shift), summed",
        "build.times(build.times(weight, scale), shift), summed",
    ),
    Fault("channels interleaved", FOLDING + "_spread", "[channels, 1]", "[1, channels]"),
    Fault(
        "groups mixed",
        FOLDING + "_along",
        "[1, rows // product.groups, 1]",
        "[rows // product.groups, 1, 1]",
    ),
    # Batch norm folding: its guards
    Fault("other users ignored", FOLDING + "_other_users", "len(node.users) != 1", "False"),
    Fault(
        "any dimension is the channels",
        FOLDING + "_misaligned",
        'return f"dimension 1',
        'return None and f"dimension 1',
    ),
    Fault(
        "rows need not be the same",
        FOLDING + "_misaligned",
        "statically_known_true(normed[0] == product[0]) and ",
        "",
    ),
    Fault("padding is shifted too", PRODUCTS + "_convolution", "if any(padding)", "if False"),
    Fault(
        "a transposed window is whole",
        PRODUCTS + "_convolution",
        'uneven = "the convolution is transposed',
        'uneven = None and "the convolution is transposed',
    ),
    Fault("alpha and beta not looked at", PRODUCTS + "_addmm", "None if node.kwargs else ", ""),
    Fault(
        "a permute keeps the order",
        PRODUCTS + "product_before",
        "in RESHAPES",
        "in (*RESHAPES, aten.permute.default)",
    ),
    # Rules: patterns
    Fault(
        "keyword defaults not spelt out",
        RULE + "_call",
        "**_keyword_defaults(node.target), ",
        "",
        True,
    ),
    Fault(
        "subtraction commutes",
        RULE + "_patterns",
        "n.target in COMMUTATIVE",
        "n.target in (*COMMUTATIVE, torch.ops.aten.sub.Tensor)",
        True,
    ),
    Fault(
        "shape of the result unchecked",
        RULE + "_other_shape",
        "if own.dtype == found.dtype and equal_shapes(own, found)",
        "if True",
    ),
    Fault(
        "every shape is equal",
        RULE + "equal_shapes",
        "return a.dim() == b.dim() and",
        "return True or",
    ),
    Fault(
        "a number is a tensor", RULE + "_not_tensors", "if numbers else None", "if False else None"
    ),
    Fault(
        "operands swapped",
        RULE + "_rewrite",
        "zip(nodes, values, strict=True)",
        "zip(reversed(nodes), values, strict=True)",
    ),
    # Rules: replacements
    Fault(
        "relu for hardtanh",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"hardtanh": "relu"}.get(unary, unary),',
    ),
    Fault(
        "gelu for gelu_tanh",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"gelu_tanh": "gelu"}.get(unary, unary),',
    ),
    Fault(
        "gelu_tanh for gelu",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"gelu": "gelu_tanh"}.get(unary, unary),',
    ),
    Fault(
        "hardswish for silu",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"silu": "hardswish"}.get(unary, unary),',
    ),
    Fault(
        "silu for hardswish",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"hardswish": "silu"}.get(unary, unary),',
    ),
    Fault(
        "sigmoid for hardsigmoid",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"hardsigmoid": "sigmoid"}.get(unary, unary),',
    ),
    Fault(
        "abs for relu",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"relu": "abs"}.get(unary, unary),',
    ),
    Fault(
        "square for abs",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, {"abs": "square"}.get(unary, unary),',
    ),
    Fault(
        "activation behind an addend lost",
        EPILOGUE + "_fused",
        "binary, unary,",
        'binary, unary if other is None else "none",',
    ),
    Fault("addend lost", EPILOGUE + "_fused", "binary, unary,", '"none", unary,'),
    Fault(
        "sub for add",
        EPILOGUE + "_fused",
        "binary, unary,",
        '{"add": "sub"}.get(binary, binary), unary,',
    ),
    Fault(
        "add for mul",
        EPILOGUE + "_fused",
        "binary, unary,",
        '{"mul": "add"}.get(binary, binary), unary,',
    ),
    Fault(
        "add for sub",
        EPILOGUE + "_fused",
        "binary, unary,",
        '{"sub": "add"}.get(binary, binary), unary,',
    ),
    Fault("scalars lost", EPILOGUE + "_fused", "[float(scalar) for scalar in scalars]", "[]"),
    Fault(
        "scalars rounded",
        EPILOGUE + "_fused",
        "[float(scalar) for scalar in scalars]",
        "[float(round(scalar)) for scalar in scalars]",
    ),
    Fault(
        "bias lost in a rule",
        EPILOGUE + "_fused",
        "**arguments)",
        '**{**arguments, "bias": None})',
    ),
    # Our ops
    Fault(
        "activation before the addend",
        "ops.epilogue:apply",
        "UNARY[unary].fn(BINARY[binary](product, other), *scalars)",
        "BINARY[binary](UNARY[unary].fn(product, *scalars), other)",
    ),
    Fault(
        "addend first",
        "ops.epilogue:apply",
        "fn(BINARY[binary](product, other)",
        'fn(BINARY[binary](*((product, other) if binary == "none" else (other, product)))',
    ),
    Fault(
        "dilation ignored",
        "ops.conv:reference",
        "(stride, padding, dilation, transposed",
        "(stride, padding, [1] * len(dilation), transposed",
    ),
    Fault(
        "stride and dilation swapped",
        "ops.conv:reference",
        "window = (stride, padding, dilation,",
        "window = (dilation, padding, stride,",
    ),
    Fault("axes swapped", "ops.conv:reference", "window = (stride,", "window = (stride[::-1],"),
    Fault("groups ignored", "ops.conv:reference", "output_padding, groups)", "output_padding, 1)"),
    # Linear layers on one input
    Fault("shares swapped", SHARED + "_join", "zip(group, shares", "zip(reversed(group), shares"),
    Fault("biases swapped", SHARED + "_product", "torch.cat(biases)", "torch.cat(biases[::-1])"),
    Fault("the first bias for all", SHARED + "_join", "node.args[0] for", "first.args[0] for"),
    Fault("the biases lost", SHARED + "_product", "if biases else None", "if False else None"),
    Fault(
        "inputs not compared", SHARED + "_source", "x.args[0] if x.target is", "x.op if x.target is"
    ),
    # Packing and prologue
    Fault("transposed once", PACKING + "transpose_weights", "range(2)", "range(1)"),
    Fault("alpha and beta not packed", PACKING + "_addmm", "if node.kwargs:", "if False:"),
    Fault(
        "bias lost when packed",
        PACKING + "_linear_product",
        "(x, packed, bias, *words, True)",
        "(x, packed, None, *words, True)",
    ),
    Fault(
        "rest of the epilogue lost",
        PACKING + "_split_epilogue",
        "str(rest), str(unary), scalars",
        "str(rest), 'none', []",
    ),
    Fault(
        "addend taken twice",
        PACKING + "_split_epilogue",
        'rest = "none" if kept == binary else binary',
        "rest = binary",
    ),
    Fault("a line padded across", PACKING + "_over_a_plane", "[0, *padding]", "[*padding, 0]"),
    Fault("a line strided across", PACKING + "_over_a_plane", "[1, *stride]", "[*stride, 1]"),
    Fault(
        "derived weights in another order",
        "passes.prologue:_replace_by_inputs",
        "enumerate(outputs)",
        "enumerate(reversed(outputs))",
    ),
    Fault(
        "copies of what others write dropped",
        "passes.noops:_is_own",
        "len(node.users) != 1",
        "False",
    ),
    Fault(
        "first of several results for all",
        "passes.whole_ops:_replace",
        "result[user.args[1]]",
        "result[0]",
    ),
)

# Edits that change no result of the replay, with the reason.
EQUIVALENT = {
    "a pattern takes inner values with other users": "they are computed twice, as they were",
    "a weight that is no parameter": "the fold holds for any tensor; it only costs time",
    "a matrix that addmm adds is a bias": "scale and shift run along its last dimension",
    "a copy with other strides dropped": "what leaves the graph gets its strides back",
    "any view of the same strides leads back": "then it has the same shape",
    "a fold of a fold rounds twice": "the replay does not round",
    "a mean far from zero in bfloat16": "the replay has no digits to lose",
    "zero-size, dtypes or a strided bias that oneDNN does not take": "only its kernels can tell",
}
