"""Attention that Inductor's patterns take for another one: backend `ipex` keeps it from them.

All sizes are the same, so that whatever is mistaken for another dimension has its shape.
"""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import fuse_attention

from ipex_inductor.passes.attention import attention, misread
from ipex_inductor.reporting import decisions
from support.case_sampling import few_with_each

SIZE = 4
HEADS, KEY = (0, 2, 1, 3), (0, 1, 3, 2)
OTHERS = [(0, 1, 3, 2), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 3, 1), (0, 3, 2, 1), (1, 2, 3, 0)]
# A rounding of probabilities in another place, on results around 1; what is misread is off by 1.
ATOL = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}


def scaled(scores, how):
    ways = {"div": scores / 2, "mul": scores * 0.5, "by query": scores, "none": scores}
    return scores / scores.new_ones(SIZE, 1, 1) if how == "tensor" else ways[how]


def masked(scores, how, mask, keep):
    """The scores after one of many masks; in `keep`, the first row and column are kept."""
    low = torch.finfo(scores.dtype).min
    rows, columns = (keep.view(SIZE, 1, *ends) for ends in ((SIZE, 1), (1, SIZE)))
    return {
        "none": lambda: scores,
        "truth": lambda: scores + (columns > 0),
        "number": lambda: scores + 1.0,
        "whole row": lambda: torch.where(rows > 0, scores, low),
        "add": lambda: scores + mask,
        "add twice": lambda: torch.add(scores, mask, alpha=2),
        "where": lambda: torch.where(columns > 0, scores, low),
        "where 0": lambda: torch.where(columns > 0, scores, torch.zeros_like(mask[0, 0, 0, 0])),
        "is 0": lambda: scores.masked_fill((columns == 0).expand_as(scores), -torch.inf),
        "is 2": lambda: scores.masked_fill((columns == 2).expand_as(scores), -torch.inf),
        "row is 0": lambda: scores.masked_fill((rows == 0).expand_as(scores), -torch.inf),
    }[how]()


def attend(form):
    """Attention as `form` says."""

    def run(q, k, v, mask, keep):
        q, v = (x.permute(dims) if dims else x for x, dims in ((q, form["q"]), (v, form["v"])))
        for dims in form["k"]:
            k = k.permute(dims)
        q = q / 2 if form["scale"] == "by query" else q
        scores = masked(scaled(q @ k, form["scale"]), form["mask"], mask, keep)
        scores = scores.view(form["view"]).softmax(form["dim"])
        return scores.view(SIZE, SIZE, SIZE, SIZE) @ v

    return run


PLAIN = {
    "q": HEADS,
    "k": [HEADS, KEY],
    "v": HEADS,
    "scale": "div",
    "mask": "none",
    "view": (SIZE, SIZE, SIZE, SIZE),
    "dim": -1,
}
FORMS = {
    "query": {"q": (2, 0, 1, 3)},
    "key": {"k": [(1, 2, 3, 0)]},
    "key's heads": {"k": [(1, 0, 2, 3), KEY]},
    "value": {"v": (0, 3, 2, 1)},
    "softmax over queries": {"dim": -2},
    "softmax over heads": {"dim": 1, "scale": "mul"},
    "softmax over all": {"view": (SIZE, SIZE, SIZE**2)},
    "scaled mask": {"mask": "add twice"},
    "what a mask is": {"mask": "is 2"},
    "rows masked": {"mask": "row is 0"},
    "fill": {"mask": "where 0"},
    "rows masked whole": {"mask": "whole row"},
    "truth values added": {"mask": "truth", "scale": "none"},
    "a number added": {"mask": "number", "scale": "none"},
    "scale by a tensor": {"scale": "tensor", "mask": "add"},
}
LEFT_TO_THEM = {
    "plain": {},
    "no heads": {"q": None, "k": [KEY], "v": None, "scale": "mul"},
    "mask": {"mask": "add"},
}


def inputs(dtype=torch.float32, grad=False):
    tensors = [torch.randn(SIZE, SIZE, SIZE, SIZE, dtype=dtype) for _ in range(3)]
    mask = torch.randn(SIZE, 1, SIZE, SIZE, dtype=dtype)
    keep = torch.randint(0, 2, (SIZE, SIZE))
    keep[:, 0] = 1
    return *(t.requires_grad_(grad) for t in tensors), mask, keep


def check(form, dtype, training):
    """Compiled against eager; whether it was hidden, and how often Inductor fused."""
    fn, given = attend({**PLAIN, **form}), inputs(dtype, training)
    compiled = torch.compile(fn, backend="ipex", options={"strict": True})
    with torch.set_grad_enabled(training):
        pairs = [(compiled(*given), fn(*given))]
    if training:
        tangent = torch.randn_like(pairs[0][0])
        pairs += zip(*(torch.autograd.grad(y, given[:3], tangent) for y in pairs[0]), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=0, atol=ATOL[dtype], equal_nan=True)
    hidden = any(misread.NAME in report.count("fired") for report in decisions.reports())
    return hidden, counters["inductor"]["fuse_attention"]


@pytest.fixture(autouse=True)
def _left_by_our_rule(op_by_op, monkeypatch):
    monkeypatch.setattr(attention, "_are_few", lambda scores: True)


@torch.no_grad()
def test_no_pattern_takes_any_of_them():
    """In one graph, each with inputs of its own: of others it would have a second user."""
    fns = [attend({**PLAIN, **form}) for form in FORMS.values()]
    given = [inputs() for _ in fns]

    def all_of(given):
        return [fn(*of) for fn, of in zip(fns, given, strict=True)]

    found = torch.compile(all_of, backend="ipex", options={"strict": True})(given)
    for name, got, want in zip(FORMS, found, all_of(given), strict=True):
        torch.testing.assert_close(
            got, want, rtol=0, atol=ATOL[got.dtype], equal_nan=True, msg=lambda m, n=name: n + m
        )
    (hidden,) = (report.count("fired")[misread.NAME] for report in decisions.reports())
    assert (hidden, counters["inductor"]["fuse_attention"]) == (len(FORMS), 0)


@pytest.mark.parametrize(
    ("name", "training"),
    [*few_with_each(itertools.product(FORMS, (False, True)), lambda name, training: (training,))],
)
def test_what_patterns_would_misread_is_kept_from_them(name, training):
    assert check(FORMS[name], torch.float32, training) == (True, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LEFT_TO_THEM)
@pytest.mark.sampled
def test_what_patterns_read_right_is_theirs(name, dtype):
    assert check(LEFT_TO_THEM[name], dtype, training=False) == (False, 1)


def test_training_with_dropout_and_an_int_for_scale_is_theirs():
    """Plain Inductor cannot compile it: a float for a scale it can."""

    def fn(q, k, v):
        q, k, v = (x.permute(HEADS) for x in (q, k, v))
        return F.dropout((q @ k.transpose(-2, -1) / 2).softmax(-1), 0.5) @ v

    result = torch.compile(fn, backend="ipex", options={"strict": True})(*inputs(grad=True)[:3])
    result.backward(torch.randn_like(result))
    assert counters["inductor"]["fuse_attention"] > 0


@pytest.mark.skipif(
    not hasattr(fuse_attention, "_sfdp_pattern_30"), reason="torch 2.11 has no pattern of it"
)
def test_torchs_own_attention_in_single_steps_is_theirs():
    """It replaces rows without scores after the softmax, which is no mask."""

    def fn(q, k, v, mask):
        q, k, v = (x.permute(HEADS) for x in (q, k, v))
        return torch._scaled_dot_product_attention_math(q, k, v, mask)[0]

    compiled = torch.compile(fn, backend="ipex", options={"strict": True})
    with torch.no_grad():
        given = inputs()[:4]
        torch.testing.assert_close(compiled(*given), fn(*given), rtol=0, atol=ATOL[torch.float32])
    assert counters["inductor"]["fuse_attention"] == 1


def extreme(x, y):
    """No attention: what is divided by is of all dimensions."""
    scores = x @ y
    return scores / scores.amax() @ y


def long(x, y):
    """No attention: a chain longer than Python's stack."""
    for _ in range(1010):
        x = x + 1e-3
    return x @ y


@pytest.mark.parametrize("fn", [extreme, long])
def test_what_is_no_attention(fn):
    x, y = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    compiled = torch.compile(fn, backend="ipex", options={"strict": True})
    with torch.no_grad():
        # fp32 sums of 4 terms around 4
        torch.testing.assert_close(compiled(x, y), fn(x, y), rtol=1e-5, atol=1e-5)


CHOICES = {
    "q": OTHERS,
    "k": [[a, b] for a in (HEADS, *OTHERS) for b in (KEY, *OTHERS)] + [[a] for a in OTHERS],
    "v": OTHERS,
    "scale": ["mul", "by query"],
    "mask": ["add", "add twice", "where", "where 0", "is 0", "is 2", "row is 0"],
    "view": [(SIZE, SIZE, SIZE**2), (SIZE, SIZE**2, SIZE)],
    "dim": [-2, 1, 0],
}


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] if n >= 9 else []) for n in range(40)]
)
@pytest.mark.sampled
def test_random_forms(seed):
    """At most three changes to what patterns know; a hundredth of these found all of the above."""
    rng = random.Random(seed)
    form = {key: rng.choice(CHOICES[key]) for key in rng.sample(list(CHOICES), rng.randint(1, 3))}
    if "view" in form and form.get("dim", -1) in (0, 1):
        del form["dim"]
    check(form, rng.choice([*ATOL]), training=seed % 2 == 1)
