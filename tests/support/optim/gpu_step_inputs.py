"""Optimizers, tensors and gradients on a GPU that tests of their steps share."""

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.optim import Lamb, Lars

SHAPES = [(3,), (257, 129), (), (0,), (64, 3, 3, 3), (4099,), (1,)]
MADE = {
    "sgd": lambda p, **o: SGD(p, lr=0.1, **o),
    "sgd momentum": lambda p, **o: SGD(p, 0.1, 0.9, dampening=0.3, weight_decay=0.1, **o),
    "sgd nesterov": lambda p, **o: SGD(p, 0.1, 0.9, nesterov=True, maximize=True, **o),
    "adagrad": lambda p, **o: Adagrad(p, 0.1, lr_decay=0.1, **o),
    "adagrad decay": lambda p, **o: Adagrad(p, 0.1, weight_decay=0.1, **o),
    "adam": lambda p, **o: Adam(p, 0.01, amsgrad=True, weight_decay=0.1, **o),
    "adamw": lambda p, **o: AdamW(p, 0.01, weight_decay=0.1, **o),
    "lamb": lambda p, fused=False, **o: Lamb(p, 0.01, weight_decay=0.1, capturable=fused),
    "lars": lambda p, **o: Lars(p, 0.1, 0.9, weight_decay=0.1, epsilon=1e-3),
    "lars plain": lambda p, **o: Lars([{"params": p, "lars": False}], 0.1, 0.9, epsilon=1e-3),
}
# The arithmetic is fp32 (fp64 for fp64), the values are about 1: some roundings of each dtype.
TOLERANCE = {dtype: 8 * torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32)} | {
    dtype: 4 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)
}
TURN = "a launch of C++"


def tensors(dtype, shapes=SHAPES, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    last = torch.channels_last
    return [nn.Parameter(t.to(memory_format=last) if t.dim() == 4 else t) for t in made]


def draw(params, *others, seed):
    """Gradients for `params`, the same ones for all `others`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for number, p in enumerate(params):
        grad = torch.randn(p.shape, device="cuda", generator=generator)
        for each in (params, *others):
            each[number].grad = torch.empty_like(each[number]).copy_(grad.to(p.dtype))


def close(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        tolerance = TOLERANCE[a.dtype]
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
        assert a.numel() < 2 or a.stride() == b.stride()


def doubles(params):
    return [nn.Parameter(p.detach().double().clone()) for p in params]


def wide_grads(params, wide):
    for p, w in zip(params, wide, strict=True):
        w.grad = None if p.grad is None else p.grad.to(torch.float64, copy=True)


CAPTURED = {
    "adamw": lambda p, rate, **o: AdamW(p, rate, weight_decay=0.1, foreach=False, **o),
    "lamb": lambda p, rate, **o: Lamb(p, rate, weight_decay=0.1, **o),
    "lars": lambda p, rate, **o: Lars(p, rate, 0.9, weight_decay=0.1, epsilon=1e-3),
}
