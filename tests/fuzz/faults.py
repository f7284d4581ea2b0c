"""Seeded faults: one edit of one function of the passes each, which the fuzzer must notice.

An edit is a piece of source text and what stands there instead; a function that no longer holds
that text exactly once is an error, so the table cannot rot. Of a function inside another, every one
that a rule holds is edited.
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
from ipex_inductor.passes import joint
from ipex_inductor.passes.engine import rule


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
        functions = _functions(self.target)
        whole = functions[0].__code__
        if self.retrace:
            rule.matcher.cache_clear()
        edited = _edited(functions[0], self.old, self.new)
        for function in functions:
            function.__code__ = edited
        try:
            yield
        finally:
            for function in functions:
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


def _functions(target: str) -> list[Any]:
    """The function called `target`, or all that rules hold of one that is made inside another."""
    module, _, qualname = target.partition(":")
    found: Any = importlib.import_module(f"ipex_inductor.{module}")
    outer, *inner = qualname.split(".")
    found = getattr(found, outer)
    if inspect.isclass(found):
        for name in inner:
            found = getattr(found, name)
    elif inner:
        return _held_by_rules(found.__module__, ".<locals>.".join((outer, *inner)))
    return [inspect.unwrap(getattr(found, "_init_fn", found))]


def _held_by_rules(module: str, qualname: str) -> list[Any]:
    functions = [f for r in joint.RULES for f in (r.pattern, r.replacement, r.when)]
    found = [f for f in functions if getattr(f, "__qualname__", "") == qualname]
    found = [f for f in found if f.__module__ == module]
    if not found:
        raise LookupError(f"no rule holds {module}:{qualname}")
    return found


def _edited(function: Callable[..., Any], old: str, new: str) -> Any:
    """The code of `function` with `old`, which it holds exactly once, replaced by `new`."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{function.__qualname__} holds {source.count(old)} times: {old}")
    text = source[source.index("def ") :].replace(old, new)
    if closed := ", ".join(function.__code__.co_freevars):
        text = f"def outer({closed}):\n{textwrap.indent(text, '    ')}"
    code = compile(text, inspect.getfile(function), "exec")
    while code.co_name != function.__name__:
        code = next(c for c in code.co_consts if inspect.iscode(c))
    if code.co_freevars != function.__code__.co_freevars:
        raise LookupError(f"{function.__qualname__} closes over other names: {old}")
    return code


FOLDING = "passes.layout.folding:"
PRODUCTS = "passes.engine.products:"
RULE = "passes.engine.rule:"
EPILOGUE = "passes.fusion.epilogue:"
PACKING = "passes.weights.packing:"
PACKABLE = "passes.engine.packable:"
SHARED = "passes.fusion.shared_input:"
ATTENTION = "passes.attention.attention:"
SCORES = "passes.attention.scores:"
LINEAR = "passes.fusion.linear:"
CONV = "passes.fusion.conv:"
CONV_OP = "ops.conv.conv:ConvArgs.window"

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
        FOLDING + "_why_misaligned",
        'return f"dimension 1',
        'return None and f"dimension 1',
    ),
    Fault(
        "rows need not be the same",
        FOLDING + "_why_misaligned",
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
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"hardtanh": "relu"}.get(unary, unary),',
    ),
    Fault(
        "gelu for gelu_tanh",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"gelu_tanh": "gelu"}.get(unary, unary),',
    ),
    Fault(
        "gelu_tanh for gelu",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"gelu": "gelu_tanh"}.get(unary, unary),',
    ),
    Fault(
        "hardswish for silu",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"silu": "hardswish"}.get(unary, unary),',
    ),
    Fault(
        "silu for hardswish",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"hardswish": "silu"}.get(unary, unary),',
    ),
    Fault(
        "sigmoid for hardsigmoid",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"hardsigmoid": "sigmoid"}.get(unary, unary),',
    ),
    Fault(
        "abs for relu",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"relu": "abs"}.get(unary, unary),',
    ),
    Fault(
        "square for abs",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, {"abs": "square"}.get(unary, unary),',
    ),
    Fault(
        "activation behind an addend lost",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        'binary, unary if other is None else "none",',
    ),
    Fault("addend lost", EPILOGUE + "_build_arguments", "binary, unary,", '"none", unary,'),
    Fault(
        "sub for add",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        '{"add": "sub"}.get(binary, binary), unary,',
    ),
    Fault(
        "add for mul",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        '{"mul": "add"}.get(binary, binary), unary,',
    ),
    Fault(
        "add for sub",
        EPILOGUE + "_build_arguments",
        "binary, unary,",
        '{"sub": "add"}.get(binary, binary), unary,',
    ),
    Fault(
        "scalars lost", EPILOGUE + "_build_arguments", "[float(scalar) for scalar in scalars]", "[]"
    ),
    Fault(
        "scalars rounded",
        EPILOGUE + "_build_arguments",
        "[float(scalar) for scalar in scalars]",
        "[float(round(scalar)) for scalar in scalars]",
    ),
    Fault(
        "bias lost in a rule",
        EPILOGUE + "_build_arguments",
        "**arguments)",
        '**{**arguments, "bias": None})',
    ),
    # Our ops
    Fault(
        "activation before the addend",
        "ops.common.epilogue:apply",
        "UNARY[unary].fn(BINARY[binary](product, other), *scalars)",
        "BINARY[binary](UNARY[unary].fn(product, *scalars), other)",
    ),
    Fault(
        "addend first",
        "ops.common.epilogue:apply",
        "fn(BINARY[binary](product, other)",
        'fn(BINARY[binary](*((product, other) if binary == "none" else (other, product)))',
    ),
    Fault(
        "dilation ignored",
        CONV_OP,
        "self.dilation)",
        "[1] * len(self.dilation))",
    ),
    Fault(
        "stride and dilation swapped",
        CONV_OP,
        "(self.stride, self.padding, self.dilation)",
        "(self.dilation, self.padding, self.stride)",
    ),
    Fault("axes swapped", CONV_OP, "(self.stride,", "(self.stride[::-1],"),
    Fault("groups ignored", CONV_OP, "self.groups", "1"),
    # Linear layers on one input
    Fault("shares swapped", SHARED + "_join", "zip(group, shares", "zip(reversed(group), shares"),
    Fault("biases swapped", SHARED + "_product", "torch.cat(biases)", "torch.cat(biases[::-1])"),
    Fault("the first bias for all", SHARED + "_join", "node.args[0] for", "first.args[0] for"),
    Fault("the biases lost", SHARED + "_product", "if biases else None", "if False else None"),
    Fault(
        "inputs not compared", SHARED + "_source", "x.args[0] if x.target is", "x.op if x.target is"
    ),
    # Attention
    Fault("scale dropped", ATTENTION + "_rewrite", "scale=scores.scale", "scale=1.0"),
    Fault("scale squared", ATTENTION + "_rewrite", "scale=scores.scale", "scale=scores.scale**2"),
    Fault(
        "scale of the query dropped",
        SCORES + "_read_query",
        "Scores(q, product.b, scale)",
        "Scores(q, product.b)",
    ),
    Fault("a quotient is a product", SCORES + "_times", "scale / factor if", "scale * factor if"),
    Fault(
        "scales of masks too",
        SCORES + "_read_scale",
        "if scores.tensors",
        "if False",
    ),
    Fault(
        "mask dropped",
        ATTENTION + "_rewrite",
        "(scores.q, scores.k, product.b, mask)",
        "(scores.q, scores.k, product.b, None)",
    ),
    Fault(
        "masks shared although they differ",
        ATTENTION + "_rewrite",
        "masks.get(scores.steps)",
        "next(iter(masks.values()), None)",
    ),
    Fault(
        "query and key swapped",
        ATTENTION + "_attend",
        "(q, k.transpose(-1, -2), v",
        "(k.transpose(-1, -2), q, v",
    ),
    Fault(
        "key and value swapped",
        ATTENTION + "_attend",
        "(q, k.transpose(-1, -2), v",
        "(q, v, k.transpose(-1, -2)",
    ),
    Fault(
        "causal too", ATTENTION + "_attend", "scale=scale", "is_causal=mask is None, scale=scale"
    ),
    Fault(
        "the kernel's strides are seen",
        ATTENTION + "_is_copied",
        "return user",
        "return True or user",
    ),
    Fault("mask added twice", SCORES + "_add", "addend.to(kind)", "2 * addend.to(kind)"),
    Fault("the first mask dropped", SCORES + "_add", "mask + addend", "addend"),
    Fault("mask behind a fill dropped", SCORES + "_add", "mask + addend", "mask"),
    Fault(
        "mask before a fill dropped",
        SCORES + "_fill",
        "if mask is None else mask.to(kind)",
        "if mask is None else torch.zeros_like(mask, dtype=kind)",
    ),
    Fault("the other side filled", SCORES + "_fill", "low) if keeps", "low) if not keeps"),
    Fault(
        "a filled mask is turned over",
        SCORES + "_read_where",
        "keeps = branches[1] is fill",
        "keeps = branches[0] is fill",
    ),
    Fault("fills that are not lost", SCORES + "_read_where", "elif low > LOST", "elif False"),
    Fault(
        "a row masked whole",
        SCORES + "_check_rows",
        "if mask is not None and",
        "if False and",
    ),
    Fault(
        "a row masked by two",
        SCORES + "_check_rows",
        "step(mask, *tensors",
        "step(None, *tensors",
    ),
    Fault(
        "rows of any mask",
        SCORES + "_check_rows",
        'raise Refused("masked scores become -inf, and a row may',
        'return None and Refused("masked scores become -inf, and a row may',
    ),
    Fault("addends of any scale", SCORES + "_read_add", "if node.kwargs", "if False"),
    Fault(
        "softmax over any dimension",
        SCORES + "attention_of",
        "if last else None",
        "if last or True else None",
    ),
    # Gated linear layers
    Fault(
        "gate and value swapped",
        LINEAR + "_gate_rule.replacement",
        "opened = linear",
        "gate, gate_bias, weight, bias = weight, bias, gate, gate_bias\n    opened = linear",
    ),
    Fault(
        "weights of gate and value swapped",
        LINEAR + "_gate_rule.replacement",
        "opened = linear",
        "gate, weight = weight, gate\n    opened = linear",
    ),
    Fault(
        "biases of gate and value swapped",
        LINEAR + "_gate_rule.replacement",
        "opened = linear",
        "gate_bias, bias = bias, gate_bias\n    opened = linear",
    ),
    Fault(
        "gate without activation",
        LINEAR + "_gate_rule.replacement",
        '"none", unary, []',
        '"none", str(unary and "none"), []',
    ),
    Fault(
        "activation behind the gate",
        LINEAR + "_gate_rule.replacement",
        'opened, "mul", "none"',
        'linear(x, gate, gate_bias, None, "none", "none", [], False), "mul", unary',
    ),
    Fault("gate added", LINEAR + "_gate_rule.replacement", '"mul"', '"add"'),
    Fault(
        "gate's bias lost",
        LINEAR + "_gate_rule.replacement",
        "gate, gate_bias",
        "gate, None and gate_bias",
    ),
    Fault(
        "value's bias lost",
        LINEAR + "_gate_rule.replacement",
        "weight, bias, opened",
        "weight, None, opened",
    ),
    # pad + conv
    Fault("padding transposed", CONV + "_pad_in_window", "pad[-2::-2]", "pad[::2]"),
    Fault("only the first padding", CONV + "_pad_in_window", "both + more", "both"),
    Fault("only the second padding", CONV + "_pad_in_window", "both + more", "more"),
    Fault("padding twice", CONV + "_pad_in_window", "both + more", "both + 2 * more"),
    Fault(
        "pad's value not looked at",
        RULE + "_call",
        "OPEN.get(node.target)",
        "{**OPEN, torch.ops.aten.constant_pad_nd.default: 2}.get(node.target)",
        True,
    ),
    Fault(
        "sides of a pad not compared",
        CONV + "_is_window",
        "if any(left != right",
        "if any(False and left != right",
    ),
    Fault(
        "padded channels not looked at", CONV + "_is_window", "if len(pad) > 2 * dims", "if False"
    ),
    Fault("cropping pads", CONV + "_is_window", "if min(pad) < 0", "if False"),
    # Packing and prologue
    Fault("transposed once", PACKING + "transpose_weights", "range(2)", "range(1)"),
    Fault("alpha and beta not packed", PACKABLE + "_addmm", "if node.kwargs:", "if False:"),
    Fault(
        "bias lost when packed",
        PACKABLE + "_linear_product",
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
    Fault("a line padded across", PACKING + "_lay_over_a_plane", "[0, *padding]", "[*padding, 0]"),
    Fault("a line strided across", PACKING + "_lay_over_a_plane", "[1, *stride]", "[*stride, 1]"),
    Fault(
        "derived weights in another order",
        "passes.weights.prologue:_replace_by_inputs",
        "enumerate(outputs)",
        "enumerate(reversed(outputs))",
    ),
    Fault(
        "copies of what others write dropped",
        "passes.fusion.noops:_is_own",
        "len(node.users) != 1",
        "False",
    ),
    Fault(
        "first of several results for all",
        "passes.engine.whole_ops:_replace",
        "result[user.args[1]]",
        "result[0]",
    ),
)

# Edits that change no result of the replay, with the reason.
EQUIVALENT = {
    "scores or probabilities with other users": "those are computed twice, as they were",
    "a mask viewed before it is expanded": "then torch cannot reshape it, and it is refused",
    "masked scores rounded by a cast": "the replay does not round",
    "a pattern takes inner values with other users": "they are computed twice, as they were",
    "a weight that is no parameter": "the fold holds for any tensor; it only costs time",
    "a matrix that addmm adds is a bias": "scale and shift run along its last dimension",
    "a copy with other strides dropped": "what leaves the graph gets its strides back",
    "any view of the same strides leads back": "then it has the same shape",
    "a fold of a fold rounds twice": "the replay does not round",
    "a mean far from zero in bfloat16": "the replay has no digits to lose",
    "zero-size, dtypes or a strided bias that oneDNN does not take": "only its kernels can tell",
}
