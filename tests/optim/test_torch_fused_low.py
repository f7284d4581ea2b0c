"""Our fused steps of bf16 and fp16 parameters on the CPU store whole vectors."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.optim import sgd

import ipex_inductor
import ipex_inductor.backend  # mends the steps
from ipex_inductor.optim.stand_ins import whole_step

LOW = [torch.bfloat16, torch.float16]
OPTIMIZE = "optimize"
SIZES = (1, 5, 16, 40, 129)  # below, at and above what a vector holds
SGD = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.5, "maximize": True},
}
OTHERS = {"Adam": {}, "AdamW": {"weight_decay": 0.1}, "Adagrad": {"lr_decay": 0.1}}


def stepped(kind: str, dtype: torch.dtype, given: dict, by: str | None, **how) -> list[Tensor]:
    """Return parameters after three steps, by a backend, `optimize` or eagerly."""
    torch.manual_seed(0)
    starts = [torch.randn(n) for n in SIZES]
    params = [nn.Parameter(start.to(torch.float16).to(dtype)) for start in starts]
    optimizer = getattr(torch.optim, kind)(params, lr=0.1, **given, **how)
    if by == OPTIMIZE:
        _, optimizer = ipex_inductor.optimize(
            nn.ParameterList(params), optimizer=optimizer, inplace=True
        )
    compiled = by not in (None, OPTIMIZE)
    step = torch.compile(optimizer.step, backend=by) if compiled else optimizer.step
    for number in range(3):
        for param, start in zip(params, starts, strict=True):
            param.grad = (start.sign() * (number + 1) / 4).to(dtype)
        step()
    return [param.detach() for param in params]


# Three roundings of numbers up to 4 to the dtype, and as many of a buffer's.
CLOSE = {torch.bfloat16: 2**-5, torch.float16: 2**-8}


@pytest.mark.sampled(
    "plain-torch.float16-optimize",
    "decay-torch.bfloat16-ipex",
    "momentum-torch.bfloat16-optimize",
    "dampening-torch.float16-ipex",
    "nesterov-torch.bfloat16-ipex",
    "maximize-torch.bfloat16-optimize",
    "momentum-torch.float16-ipex",
)
@pytest.mark.parametrize("by", ["ipex", OPTIMIZE])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", SGD)
def test_sgd_stores_what_it_computes(name, dtype, by):
    got = stepped("SGD", dtype, SGD[name], by, fused=True)
    exact = stepped("SGD", torch.float64, SGD[name], None, foreach=True)
    for one, two in zip(got, exact, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("by", [None, "eager", "inductor"], ids=str)
def test_steps_of_others_stay_as_they_were(by, monkeypatch):
    torch._dynamo.reset()
    got = stepped("SGD", torch.bfloat16, SGD["momentum"], by, fused=True)
    torch._dynamo.reset()
    monkeypatch.setattr(sgd, "_fused_sgd", inspect.unwrap(sgd._fused_sgd))
    want = stepped("SGD", torch.bfloat16, SGD["momentum"], None, fused=True)
    for one, two in zip(got, want, strict=True):
        assert torch.equal(one, two)


def test_a_step_within_our_optimizers_is_ours():
    """Parameters that our kernels leave to torch."""
    param = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD([param], lr=0.5, fused=True)
    whole_step(optimizer, {}, optimizer.step, None, (), {})
    assert torch.equal(param, torch.full_like(param, 0.5))


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_others_do_as_they_are(kind, dtype):
    got = stepped(kind, dtype, OTHERS[kind], "ipex", fused=True)
    exact = stepped(kind, torch.float64, OTHERS[kind], None, foreach=True)
    for one, two in zip(got, exact, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_parameters_of_several_dtypes_and_state():
    """Each by what is right for it; buffers are the optimizer's."""
    params = [nn.Parameter(torch.ones(40, dtype=t)) for t in (torch.float32, *LOW)]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=True)
    for param in params:
        param.grad = torch.ones_like(param)
    step = torch.compile(optimizer.step, backend="ipex")
    step()
    step()
    for param in params:
        assert optimizer.state[param]["momentum_buffer"].dtype == param.dtype
        torch.testing.assert_close(param, torch.full_like(param, 1 - 0.5 - 0.75))


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_under_a_scaler_and_in_a_graph(dtype, found, op_by_op):
    """The op itself beside other work, where no kernel of ours reads the step."""

    def fn(param: Tensor, grad: Tensor, buffer: Tensor, inf: Tensor, scale: Tensor) -> Tensor:
        numbers = {"weight_decay": 0.0, "momentum": 0.5, "lr": 0.5, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        scaled = {"grad_scale": scale, "found_inf": inf}
        with torch.no_grad():
            torch._fused_sgd_([param], [grad], [buffer], **numbers, **flags, **scaled)
        return param.float().sin()

    param, grad, buffer = (torch.ones(40, dtype=dtype) for _ in range(3))
    inf, scale = torch.tensor(found), torch.tensor(2.0)
    compiled = torch.compile(fn, backend="ipex", options={"strict": True})
    result = compiled(param, grad, buffer, inf, scale)
    want = 1.0 if found else 1 - 0.5 * (0.5 + 0.5)
    torch.testing.assert_close(param, torch.full_like(param, want))
    torch.testing.assert_close(result, param.float().sin())
