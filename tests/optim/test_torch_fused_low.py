"""torch's fused steps of bf16 and fp16 parameters on the CPU: whole vectors are stored too."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from ipex_inductor import compat

LOW = [torch.bfloat16, torch.float16]
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


def stepped(kind: str, dtype: torch.dtype, given: dict, compiled: bool, **how) -> list[Tensor]:
    """Parameters behind three steps of gradients that are alike for all."""
    torch.manual_seed(0)
    starts = [torch.randn(n) for n in SIZES]
    params = [nn.Parameter(start.to(torch.float16).to(dtype)) for start in starts]
    optimizer = getattr(torch.optim, kind)(params, lr=0.1, **given, **how)
    step = torch.compile(optimizer.step, backend="ipex") if compiled else optimizer.step
    for number in range(3):
        for param, start in zip(params, starts, strict=True):
            param.grad = (start.sign() * (number + 1) / 4).to(dtype)
        step()
    return [param.detach() for param in params]


# Three roundings of numbers up to 4 to the dtype, and as many of a buffer's.
CLOSE = {torch.bfloat16: 2**-5, torch.float16: 2**-8}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", SGD)
def test_sgd_stores_what_it_computes(name, dtype, compiled):
    """Once the backend is there, eager steps as well, which compiled ones call."""
    compat.mend_fused_sgd()
    got = stepped("SGD", dtype, SGD[name], compiled, fused=True)
    exact = stepped("SGD", torch.float64, SGD[name], False, foreach=True)
    for one, two in zip(got, exact, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_others_do_as_they_are(kind, dtype):
    got = stepped(kind, dtype, OTHERS[kind], True, fused=True)
    exact = stepped(kind, torch.float64, OTHERS[kind], False, foreach=True)
    for one, two in zip(got, exact, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_parameters_of_several_dtypes_and_state():
    """Each by what is right for it; buffers are the optimizer's."""
    compat.mend_fused_sgd()
    params = [nn.Parameter(torch.ones(40, dtype=t)) for t in (torch.float32, *LOW)]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=True)
    for _, param in itertools.product(range(2), params):
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
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
