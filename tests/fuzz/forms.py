"""Every rule in turn, as a piece of a program: its own pattern on one of its own forms.

The sizes and numbers of the form's example become others that fit together and that the rule's own
`when` takes, so what is drawn here fires, whatever the rules of the day are.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fuzz import restated
from fuzz.attention import attention
from fuzz.builder import Builder
from fuzz.motifs import (
    PRODUCTS,
    addmm_norm,
    batch_norm,
    bias,
    fresh,
    other,
    padded_conv,
    shared_input,
)
from ipex_inductor.passes import joint
from ipex_inductor.passes.engine.rule import Constant, Form, Rule

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
ATTEMPTS = 80  # one in seven fits a convolution
VARIANTS = 4  # of the sizes of a form: torch keeps what it computed of each shape
NEAR_MISS = 0.03  # of the rules' pieces may be refused
UNFIT = (RuntimeError, ValueError, TypeError, IndexError)  # what torch raises on odd sizes


def due(seed: int, count: int) -> list[str]:
    """The rules that program `seed` tries: over all seeds as often as `turns` has them."""
    places = range(seed * count, seed * count + count)
    return [_deck(*divmod(place, len(turns()))) for place in places]


def turns() -> list[str]:
    """Every rule, more often where half its pieces are refused, or where it reads many forms."""
    return sorted(name for name in joint.RULE_NAMES for _ in range(TURNS.get(name, 1)))


def _deck(turn: int, number: int) -> str:
    """Each turn goes through all rules, in an order of its own."""
    names = turns()
    return random.Random(f"turn {turn}").sample(names, len(names))[number]


@dataclass(frozen=True)
class Drawn:
    """A rule to try: `make` gives its value, None where nothing fits; in `dtype`, or in any."""

    name: str
    make: Callable[[Builder], str | None]
    dtype: str | None = None


def draw(rng: random.Random, name: str) -> Drawn:
    """One way to try the rule called `name`."""
    spellings = [rule for rule in joint.RULES if rule.name == name]
    if name in LOOKALIKES and rng.random() < 0.5:
        return Drawn(name, LOOKALIKES[name])
    if not spellings:
        return Drawn(name, BESIDES[name], "float32" if name.startswith("batch_norm+") else None)
    number = rng.randrange(len(spellings))
    rule = spellings[number]
    form = rng.choice([f for f in rule.forms if _dtypes(f) <= DTYPES.keys()])
    narrow = [DTYPES[d] for d in _dtypes(form) if d != torch.float32]
    return Drawn(name, functools.partial(_from_rule, rule, number, form), next(iter(narrow), None))


@functools.cache
def _example(form: Form) -> dict:
    return form.example()


@functools.cache
def _dtypes(form: Form) -> frozenset[torch.dtype]:
    tensors = [v for v in _example(form).values() if isinstance(v, torch.Tensor)]
    return frozenset(t.dtype for t in tensors if t.is_floating_point())


# Rules that are no pattern with a replacement


def _norm_behind(kind):
    # Behind a linear layer, dimension 1 is the channels where there are no others.
    return lambda b: batch_norm(b, PRODUCTS[kind](b, fresh(b, 2) if kind == "linear" else None))


def _norm_before(kind):
    def piece(b):
        dims = 0 if kind == "linear" else int(kind[-2])
        v = batch_norm(b, fresh(b, dims + 2))
        w = b.parameter(b.pick(4, 6), b.shape(v)[1], *[b.pick(1, 2)] * dims)
        return b.emit(f"F.{kind}({v}, {w}, {bias(b, b.shape(w)[0])})")

    return piece


def _preactivated(b):
    v = b.emit(f"F.relu({batch_norm(b, fresh(b, 4))})")
    w = b.parameter(b.pick(4, 6), b.shape(v)[1], 1, 1)
    return b.emit(f"F.conv2d({v}, {w}, {bias(b, b.shape(w)[0])})")


KINDS = ("conv1d", "conv2d", "conv3d", "linear")
BESIDES = {
    **{f"{kind}+batch_norm": _norm_behind(kind) for kind in KINDS},
    **{f"conv_transpose{n}d+batch_norm": _norm_behind(f"conv_transpose{n}d") for n in (1, 2, 3)},
    **{f"batch_norm+{kind}": _norm_before(kind) for kind in KINDS},
    "batch_norm+relu|conv": _preactivated,
    "attention-copies": restated.copied_heads,
    "conv|upsample": restated.upsampled,
    "embedding-bag": restated.equal_bags,
    "patch-conv": restated.patches,
    "video-stem": restated.video,
    "linear|linear": shared_input,
    "softmax(q@k)@v": attention,
}


TURNS = {**dict.fromkeys(BESIDES, 2), "linear+batch_norm": 3, "pad+conv": 2, "softmax(q@k)@v": 10}

# What the example of a rule has no room for: what it must refuse, above all
LOOKALIKES = {"pad+conv": padded_conv, "linear+batch_norm": addmm_norm}


# Those that are


def _from_rule(rule, number, form, b):
    """The rule's pattern on arguments like its example's."""
    example = _example(form)
    like_result = _like_result(rule, form)
    variant = b.rng.randrange(VARIANTS)
    for attempt in itertools.count(1):
        rng = random.Random(f"{variant} {attempt}")  # the same for all rules of a family
        values = _sized(b, rng, rule, example, keep=attempt >= ATTEMPTS)
        values = _fitted(b, rule, values, like_result)
        if values is not None:
            break
        if attempt == ATTEMPTS + 1:
            return None
    called = f"{rule.name!r}, {number}" if number else repr(rule.name)
    shapes = {k: tuple(v.shape) for k, v in values.items() if isinstance(v, torch.Tensor)}
    for shift in (0.0, 4.0, 16.0):  # up to where logarithms and roots are numbers
        marked = len(b.leaves), len(b.steps)
        arguments = {**values, **{k: _leaf(b, rule, k, values[k], shift) for k in shapes}}
        text = ", ".join(f"{k}={v}" for k, v in arguments.items())
        found = b.emit(f"rule({called})({text})")
        if b.env[found].isfinite().all():
            return found
        if shift < 16:
            del b.leaves[marked[0] :], b.steps[marked[1] :]
    return found


@functools.cache
def _like_result(rule: Rule, form: Form) -> tuple[str, ...]:
    """The arguments that have the shape of the result, which may be a number in their stead."""
    values = {k: _meta(v) for k, v in _example(form).items()}
    shape, found = rule.pattern(**values).shape, []
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            continue
        try:
            one = {name: value.new_empty(())}
            alone = rule.pattern(**{**values, **one}).shape
        except UNFIT:
            continue
        if alone == shape:
            values |= one
            found.append(name)
    return tuple(found)


def _meta(value):
    if isinstance(value, Constant):
        return value.value
    return value if value is None else value.to("meta")


def _sized(b, rng, rule, example, keep):
    """Other sizes and numbers, the same for the same; tensors of zeros."""
    tensors = {k: v for k, v in example.items() if isinstance(v, torch.Tensor)}
    sizes = {
        n: min(n, 64) if keep else rng.choice((2, 3, 4, 6))
        for v in tensors.values()
        for n in v.shape
    }
    weights = {n for k, v in tensors.items() if _is_weight(rule, k, v) for n in v.shape}
    numbers = set(_numbers([v.value for v in example.values() if isinstance(v, Constant)]))
    free = sorted(sizes.keys() - weights - numbers)
    sizes |= dict(zip(b.rng.sample(free, len(free)), b.free_sizes(), strict=False))
    sizes[1] = 1
    values = {}
    for key, value in example.items():
        if isinstance(value, torch.Tensor):
            values[key] = _zeros(value, [sizes[n] for n in value.shape], b.dtype)
        else:
            values[key] = value and _number(rng, value.value, sizes, keep)
    return values


def _zeros(like, shape, dtype):
    """Zeros of this shape, with the dimensions in the same order in memory."""
    dtype = getattr(torch, dtype) if like.is_floating_point() else like.dtype
    order = _order(like)
    if order == sorted(order):
        return torch.zeros(shape, dtype=dtype)
    turned = torch.zeros([shape[d] for d in order], dtype=dtype)
    return turned.permute([order.index(d) for d in range(len(shape))])


def _order(value):
    return sorted(range(value.dim()), key=lambda d: -value.stride(d))


def _numbers(value) -> Iterator[int]:
    if isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_numbers, value))
    elif isinstance(value, int):
        yield value


def _number(rng, value, sizes, keep):
    """Another number where one is free, sometimes a size; a list keeps its length."""
    if keep or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_number(rng, v, sizes, keep) for v in value]
    if isinstance(value, int):
        return sizes[value] if value in sizes and rng.random() < 0.5 else rng.choice((1, 2))
    return rng.choice((0.25, 0.5, value))


def _fitted(b, rule, values, like_result):
    """The arguments with those like the result in its shape; None where they do not fit."""
    try:
        if any(v.numel() > 5_000 for v in values.values() if isinstance(v, torch.Tensor)):
            return None
        ones = {name: values[name].new_zeros(()) for name in like_result}
        result = rule.pattern(**{**values, **ones})
        values = {**values, **{k: torch.zeros_like(result) for k in like_result}}
        if b.chance(NEAR_MISS) or rule.when({**values, "result": result}) is None:
            return values if result.numel() and rule.pattern(**values).dim() else None
    except UNFIT:
        pass
    return None


def _is_weight(rule, key, value):
    return key in rule.weights or "weight" in key or "bias" in key or value.dim() == 1


def _leaf(b, rule, key, value, shift):
    """A leaf, or a live value, for an argument like `value`."""
    order = _order(value)
    shape = [value.shape[d] for d in order]
    if value.dtype == torch.bool:
        name = b.input(*shape, fill="mask")
    elif not value.is_floating_point():
        name = b.input(*shape, fill="index", scale=2)
    elif _is_weight(rule, key, value):
        name = b.parameter(*shape, shift=shift if value.dim() == 1 else 0.0)
    elif shift:
        name = b.input(*shape, shift=shift if math.prod(shape) < 100 else 0.0)
    else:
        name = other(b, tuple(shape))
    if order == sorted(order):
        return name
    return b.emit(f"{name}.permute({', '.join(str(order.index(d)) for d in range(len(order)))})")
