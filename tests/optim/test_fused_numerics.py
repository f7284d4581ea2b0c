"""Fused steps are as near to fp64 as torch's own steps are, in every variant and storage."""

import itertools
import math
import struct
from array import array
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.ops.optimizer.update import Update
from ipex_inductor.optim import FusedStep, Lamb, Lars, fuse_step, kernels, planning
from ipex_inductor.optim.launching import launch_groups
from ipex_inductor.templates.optimizer import step_cpp
from ipex_inductor.templates.optimizer.formulas import FORMULAS
from ipex_inductor.templates.optimizer.step import update_source
from support.optim.optimizer_variants import (
    LOW,
    ONE_EACH,
    VARIANTS,
    copies,
    in_groups,
    single,
    tensors,
)
from support.optim.step_checks import check_alone, check_fp32, check_fp64, check_kept


def crossed(kind, **options):
    """All combinations, by name."""
    for values in itertools.product(*options.values()):
        given = dict(zip(options, values, strict=True))
        if not given.get("nesterov") or (given["momentum"] and not given["dampening"]):
            yield f"{kind.__name__} {given}", partial(kind, **given)


each_optimizer = pytest.mark.parametrize("variant", ONE_EACH)
YES = (False, True)
RATES, BETAS = (0.03, torch.tensor(0.03, dtype=torch.float64)), ((0.9, 0.999), (0.0, 0.5))
ADAMS = {
    "lr": RATES,
    "betas": BETAS,
    "weight_decay": (0.0, 0.1),
    "amsgrad": YES,
    "maximize": YES,
}
CROSSED = dict(
    itertools.chain(
        crossed(
            SGD,
            lr=RATES,
            momentum=(0.0, 0.9),
            dampening=(0.0, 0.3),
            nesterov=YES,
            weight_decay=(0.0, 0.1),
            maximize=YES,
        ),
        crossed(
            Adagrad,
            lr=RATES,
            lr_decay=(0.0, 0.1),
            weight_decay=(0.0, 0.1),
            initial_accumulator_value=(0.0, 0.5),
            maximize=YES,
        ),
        crossed(Adam, decoupled_weight_decay=YES, **ADAMS),
        crossed(AdamW, **ADAMS),
        crossed(Lamb, lr=RATES, betas=BETAS, weight_decay=(0.0, 0.1)),
        crossed(Lars, lr=RATES, momentum=(0.0, 0.9), weight_decay=(0.0, 0.1), epsilon=(0.0, 0.1)),
    )
)


# The formulas themselves

WORDS = {
    "sqrt": lambda x: x.sqrt() if isinstance(x, torch.Tensor) else math.sqrt(x),
    "maximum": torch.maximum,
    "where": lambda condition, yes, no: yes if condition else no,
}


@torch.no_grad()
def interpret(optimizer, count):
    """A step by the lines of the formula, which are Python as well."""
    rule = FORMULAS[type(optimizer).__name__]
    for group in optimizer.param_groups:
        on = planning.flags_of(optimizer, group)
        numbers = launch_groups.own_numbers(group, rule.numbers, 1.0)
        for param in group["params"]:
            own = optimizer.state[param]
            if not own:
                own.update({name: torch.zeros_like(param) for name in rule.state(on)})
            scope = dict(zip(rule.numbers, numbers, strict=True), step=count, first=count == 1)
            scope |= {"param": param.clone(), "grad": param.grad}
            scope |= {name: own[name] for name in rule.state(on)}
            for lines in (rule.scalars, rule.before):
                exec("\n".join(lines(on)), WORDS, scope)
            scope |= {f"norm_{name}": scope[name].norm().item() for name in rule.norms}
            for lines in (rule.ratios, rule.update):
                exec("\n".join(lines(on)), WORDS, scope)
            param.copy_(scope["param"])
            own.update({name: scope[name] for name in rule.state(on)})


@pytest.mark.parametrize("kind", dict.fromkeys(make.func for make in CROSSED.values()))
def test_formulas_are_torchs_in_every_combination(kind):
    """In fp64, where what is legal and what is not differ by five orders of magnitude."""
    for name, make in CROSSED.items():
        if make.func is not kind:
            continue
        ours = tensors(torch.float64, [(5,), (2, 3)])
        theirs = copies(ours)
        optimizer, reference = make(in_groups(ours)), single(make)(in_groups(theirs))
        for count in range(1, 11):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            interpret(optimizer, count)
            reference.step()
        for p, q in zip(ours, theirs, strict=True):
            mine, own = optimizer.state[p], reference.state[q]
            assert mine.keys() | {"step"} == own.keys() | {"step"}  # which `interpret` counts
            mine, own = ({**state, "param": x, "step": 0} for state, x in ((mine, p), (own, q)))
            torch.testing.assert_close(mine, own, rtol=1e-12, atol=1e-12, msg=name)


# Kernels: half a second each to compile


def quick(ways):
    """Ways to hold weights, with optimizers; fp16 differs from bf16 in conversions alone."""
    cases = []
    for held, variant in itertools.product(ways, ONE_EACH):
        rare = held[0] is torch.float16 and variant not in ("adagrad", "lamb decay")
        # A master is stepped as a weight in fp32, and rounded once: two optimizers.
        rare |= held == LOW["bf16 master"] and variant not in ("sgd momentum", "lars momentum")
        marks = pytest.mark.slow if rare else ()
        cases.append(pytest.param(held, variant, marks=marks, id=f"{held}-{variant}"))
    return cases


# What a flag changes is in the formula, compared above; quickly each flag and form once.
ONCE = ("sgd nesterov", "sgd maximize", "sgd dampening", "adagrad decays", "adagrad start")
ONCE += ("adagrad foreach", "adam torch-fused", "adam tensor lr", "lars", *ONE_EACH)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "variant", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ONCE)) for n in VARIANTS]
)
def test_fp32(variant):
    check_fp32(VARIANTS[variant], tensors())


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSSED)
def test_fp32_in_every_combination(name):
    check_fp32(CROSSED[name], tensors())


SUMMED = ("adamw", "lamb decay", "lars momentum")  # two with norms, and one without


@pytest.mark.parametrize(
    "variant",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in SUMMED)) for n in ONE_EACH],
)
def test_several_chunks(variant):
    """Norms add up over them, of weights that grow from chunk to chunk."""
    ours = tensors(torch.float32, [(3,), (2 * step_cpp.CHUNK + 3,)])
    ours[1].data *= torch.linspace(0, 2, ours[1].numel())
    check_fp32(VARIANTS[variant], ours, steps=5)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in SUMMED)) for n in ONE_EACH],
)
def test_threads_change_no_bit(variant):
    """They share chunks, and sums of chunks are added in order."""
    results = []
    for threads in (1, 2, 2):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        params = tensors(torch.float32, [(3,), (3 * step_cpp.CHUNK + 5,)])
        optimizer = VARIANTS[variant](in_groups(params))
        fuse_step(optimizer)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape)
            optimizer.step()
        results.append((params, optimizer.state_dict()["state"]))
    torch.set_num_threads(1)
    for again in results[1:]:
        torch.testing.assert_close(again, results[0], rtol=0, atol=0)


@pytest.mark.parametrize(("held", "variant"), quick(LOW.values()))
@pytest.mark.sampled
def test_low_precision_with_all_bits_kept(held, variant):
    check_kept(held, VARIANTS[variant])


@pytest.mark.parametrize(("held", "variant"), quick([(torch.bfloat16,), (torch.float16,)]))
@pytest.mark.sampled
def test_low_precision_alone(held, variant):
    check_alone(held[0], VARIANTS[variant])


@each_optimizer
def test_fp64(variant):
    check_fp64(VARIANTS[variant])


@pytest.mark.parametrize("rate", [0.5, struct.unpack("d", b"\xff" * 8)[0]], ids=["rate", "NaN"])
@pytest.mark.parametrize("kind", [SGD, Adam, Adagrad])
def test_no_nan_becomes_a_number(kind, rate):
    """Rounding would carry one whose lower bits are set into the sign, or into infinity."""
    bits = torch.arange(-(2**15), 2**15).short()
    bits = torch.cat([bits, bits[1:]])  # in both halves of a word
    weight = torch.nn.Parameter(torch.ones(len(bits)).bfloat16())
    optimizer = kind([weight], lr=0.5)
    optimizer.param_groups[0]["lr"] = rate
    assert fuse_step(optimizer) is None
    for _ in range(2):
        weight.grad = bits.view(torch.bfloat16)
        optimizer.step()
    odd = weight.grad.isnan()
    assert odd.sum() > 500  # of each sign
    assert weight[odd].isnan().all()
    assert weight[~odd].isnan().all() == (rate != rate)


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 17, 70_001])
def test_bf16_two_to_a_word(count, zeroed, monkeypatch):
    """Each number comes out at its place, an odd one too, and NaN; all sums are exact."""
    monkeypatch.setattr(kernels, "_tell", None)  # nothing is left to torch
    values = torch.arange(count).remainder(61)
    grad = values.remainder(7).sub(3).bfloat16()
    grad[-1] = torch.nan
    weight = torch.nn.Parameter(values.bfloat16())
    optimizer = SGD([weight], lr=0.5, momentum=0.5)
    FusedStep(optimizer, zero_grad=zeroed)
    for factor in (1, 1.5):  # what the buffer holds by then
        weight.grad = grad.clone()
        expected = weight.detach().float() - 0.5 * factor * grad.float()
        optimizer.step()
        torch.testing.assert_close(
            weight.detach().float(), expected, rtol=0, atol=0, equal_nan=True
        )
        assert not (zeroed and weight.grad.any())


@pytest.mark.host("a kernel in C++")
@pytest.mark.parametrize("count", [1, 15, 16, 33, 67, 70_001])
def test_every_word_of_updates_in_bf16(count):
    """Two to a word and many at a time: each element is what torch makes of it, NaN too.

    Within a rounding of bf16, as a sum and a product may be rounded once in fp32, or twice; where
    a sum cancels, within fp32's eps of what it is of, which is below 32.
    """
    a, b, c, w = low = [torch.randn(count + 1).bfloat16()[1:] for _ in range(4)]  # not aligned
    a[::4], b[::5], c[::7], w[::3] = torch.nan, torch.nan, torch.inf, 0.25
    columns = dict(zip("abcw", low, strict=True)) | {"param": torch.randn(count).bfloat16()}
    a, b, c, w = (x.float() for x in low)
    lines = {
        "a": ("maximum(a, b)", torch.maximum(a, b)),
        "b": ("sqrt(c * c + 1) / -b", torch.sqrt(c * c + 1) / -b),
        "c": ("where(w < 0.5, a + w * (b - a), b - (b - a) * (1 - w))", torch.lerp(a, b, w)),
        "w": ("n", torch.full_like(w, 0.3)),
        "param": ("pow(as_bfloat16(c * n), 2) - w", (c * 0.3).bfloat16().float().square() - w),
    }
    made = [f"{name}_new = {line}" for name, (line, _) in lines.items()]
    update = Update(
        columns=tuple((name, "bfloat16") for name in columns),
        stored=tuple(lines),
        numbers=(("n", ""),),
        counted="",
        scalars=(),
        lines=(*made, *(f"{name} = {name}_new" for name in lines)),
    )
    step = step_cpp.function_of(lambda: update_source(update), {"template": "test", **vars(update)})
    table = step_cpp.Table()
    table.add([*(x.data_ptr() for x in columns.values()), 0, 0], count)
    table.step(step, table.rows, array("d", [0.3]))
    for name, (_, expected) in lines.items():
        torch.testing.assert_close(
            columns[name], expected.bfloat16(), rtol=2**-7, atol=2**-18, equal_nan=True
        )
