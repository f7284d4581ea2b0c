"""torch's own fused steps in a function that is compiled: `torch._fused_adamw_` and its like."""

from contextlib import suppress
from functools import partial

import pytest
import torch

from ipex_inductor.reporting import decisions

SHAPES = [(3, 5), (7,), (1,)]
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
SGD = {"momentum": 0.9, "dampening": 0.3, "nesterov": False, "weight_decay": 0.1}
ADAGRAD = {"lr_decay": 0.1, "eps": 1e-8, "weight_decay": 0.1}
CASES = {
    "adam": (torch._fused_adam_, ADAM),
    "adam decay": (torch._fused_adam_, {**ADAM, "weight_decay": 0.1, "maximize": True}),
    "adam amsgrad": (torch._fused_adam_, {**ADAM, "amsgrad": True}),
    "adamw": (torch._fused_adamw_, {**ADAM, "weight_decay": 0.1, "beta1": 0.3}),
    "adamw tensor lr": (
        torch._fused_adamw_,
        {**ADAM, "lr": torch.tensor(0.03), "weight_decay": 0.1},
    ),
    "sgd": (torch._fused_sgd_, {**SGD, "momentum": 0.0}),
    "sgd momentum": (torch._fused_sgd_, SGD),
    "sgd nesterov": (torch._fused_sgd_, {**SGD, "nesterov": True, "dampening": 0.0}),
    "adagrad": (torch._fused_adagrad_, ADAGRAD),
}
# The roundings of three steps; bf16 is stored each step: one rounding of numbers up to 4.
CLOSE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7},
}


def stepped(op, told, lists, steps, first):
    """What a user compiles."""
    with torch.no_grad():
        torch._foreach_add_(steps, 1)
        more = {"is_first_step": first} if op is torch._fused_sgd_ else {}
        op(*lists, **more, **{"lr": 0.03, "maximize": False, **told})


def made(op, told, dtype):
    """The lists of one call, steps among them, and these alone."""
    torch.manual_seed(0)
    params, grads = ([torch.randn(s).to(dtype) for s in SHAPES] for _ in range(2))
    zeros, more = ([torch.zeros_like(p) for p in params] for _ in range(2))
    steps = [torch.zeros(()) for _ in params]
    if op is torch._fused_sgd_:  # a first step reads no buffer
        nans = [torch.full_like(p, torch.nan) for p in params]
        return [params, grads, nans if told["momentum"] else []], steps
    if op is torch._fused_adagrad_:
        return [params, grads, zeros, steps], steps
    most = [torch.zeros_like(p) for p in params] if told["amsgrad"] else []
    return [params, grads, zeros, more, most, steps], steps


@pytest.mark.sampled(
    "adam amsgrad-dtype7", "adamw tensor lr-dtype12", "sgd momentum-dtype20", "adagrad-dtype24"
)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=[pytest.mark.slow] * rare)
        for case in CASES
        for dtype in CLOSE
        for rare in [dtype is not torch.float64 and case not in ("adam amsgrad", "sgd momentum")]
    ],
)
def test_as_torchs(case, dtype, launches):
    op, told = CASES[case]
    if op is torch._fused_adagrad_ and torch.__version__ < (2, 13):
        pytest.skip("Dynamo of 2.11 leaves it out of graphs")
    plain = partial(stepped, op, told)
    compiled = torch.compile(plain, backend="ipex", options={"strict": True})
    (ours, mine), (theirs, own) = (made(op, told, dtype) for _ in range(2))
    for count in range(3):
        compiled(ours, mine, count == 0)
        plain(theirs, own, count == 0)
        for a, b in zip(ours[1], theirs[1], strict=True):
            a.copy_(torch.randn(a.shape))
            b.copy_(a)
    assert len(launches) >= 3
    assert not [e for r in decisions.reports() for e in r.events if e.kind == "missed"]
    torch.testing.assert_close(ours, theirs, **CLOSE[dtype])
    torch.testing.assert_close(mine, own, rtol=0, atol=0)


def test_a_beta_that_changes(launches):
    """Dynamo makes an input of it."""
    op, told = CASES["adamw"]

    def warmer(lists, steps, beta):
        stepped(op, {**told, "beta1": beta}, lists, steps, False)

    compiled = torch.compile(warmer, backend="ipex", options={"strict": True})
    (ours, mine), (theirs, own) = (made(op, told, torch.float64) for _ in range(2))
    for beta in (0.9, 0.95, 0.3):
        compiled(ours, mine, beta)
        warmer(theirs, own, beta)
    assert len(launches) == 3
    torch.testing.assert_close(ours, theirs, **CLOSE[torch.float64])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda _: {"found_inf": torch.zeros(())}, "under a GradScaler"),
        (lambda lists: lists[3].pop(), "several lengths"),
    ],
    ids=["a scaler", "lengths"],
)
def test_what_is_not_read_says_why(spoil, reason):
    op, told = CASES["adamw"]
    lists, steps = made(op, told, torch.float32)
    more = spoil(lists)
    run = partial(stepped, op, {**told, **(more if isinstance(more, dict) else {})})
    with suppress(RuntimeError):  # torch's own: AOT autograd has no empty lists, nor such
        torch.compile(run, backend="ipex")(lists, steps, True)
    assert any(reason in e.reason for r in decisions.reports() for e in r.events)
