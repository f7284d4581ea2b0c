"""Optimizer formulas of one element, in lines that are valid Python and C++.

Lines are assignments of `+ - * /`, comparisons, and calls of `sqrt`, `pow`, `maximum`, `where`.
`scalars` (fp64, once a tensor and step) read the group's numbers and `step`, or `first`. Their
results are read by `update` (fp32, fp64 for fp64 parameters, each element), which reads and writes
`param`, `grad` and the state. If a norm of a whole tensor takes part there are two passes: `before`
and the sums of squares of `norms`, then `ratios` (fp64, once a tensor) of `norm_...`.

torch's formulas are those of its `_single_tensor_` functions, as of 2.13.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Flags = frozenset[str]
Lines = Callable[[Flags], Iterator[str]]


def _none(_: Flags) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Formula:
    """An optimizer: its numbers, the flags that change its code, its state by flag, its lines."""

    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    state: Callable[[Flags], tuple[str, ...]]
    scalars: Lines
    update: Lines
    counts: bool = True  # whether the state counts steps; else the scalars read `first`
    norms: tuple[str, ...] = ()
    before: Lines = _none
    ratios: Lines = _none


def _sgd_state(on: Flags) -> tuple[str, ...]:
    return ("momentum_buffer",) if "momentum" in on else ()


def _sgd_scalars(on: Flags) -> Iterator[str]:
    yield "rate = lr"
    if "momentum" in on:  # the first gradient is taken whole
        yield "kept = where(first, 0, momentum)"
        yield "taken = where(first, 1, 1 - dampening)"


def _sgd(on: Flags) -> Iterator[str]:
    if "maximize" in on:
        yield "grad = -grad"
    if "weight_decay" in on:
        yield "grad = grad + weight_decay * param"
    if "momentum" in on:
        yield "momentum_buffer = kept * momentum_buffer + taken * grad"
        nesterov = "grad + momentum * momentum_buffer"
        yield f"grad = {nesterov if 'nesterov' in on else 'momentum_buffer'}"
    yield "param = param - rate * grad"


def _adagrad_scalars(_: Flags) -> Iterator[str]:
    yield "rate = lr / (1 + (step - 1) * lr_decay)"


def _adagrad(on: Flags) -> Iterator[str]:
    if "maximize" in on:
        yield "grad = -grad"
    if "weight_decay" in on:
        yield "grad = grad + weight_decay * param"
    yield "sum = sum + grad * grad"
    yield "param = param - rate * grad / (sqrt(sum) + eps)"


def _adam_state(on: Flags) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * ("amsgrad" in on)


def _adam_scalars(_: Flags) -> Iterator[str]:
    yield "new1 = 1 - beta1"
    yield "new2 = 1 - beta2"
    yield "unbiased = 1 / sqrt(1 - pow(beta2, step))"
    yield "rate = lr / (1 - pow(beta1, step))"
    yield "kept = 1 - lr * weight_decay"


def _moments(_: Flags) -> Iterator[str]:
    near, far = "exp_avg + new1 * (grad - exp_avg)", "grad - beta1 * (grad - exp_avg)"
    yield f"exp_avg = where(new1 < 0.5, {near}, {far})"  # as torch's `lerp`
    yield "exp_avg_sq = beta2 * exp_avg_sq + new2 * grad * grad"


def _adam(on: Flags) -> Iterator[str]:
    if "maximize" in on:
        yield "grad = -grad"
    if "decoupled_weight_decay" in on:
        yield "param = param * kept"
    elif "weight_decay" in on:
        yield "grad = grad + weight_decay * param"
    yield from _moments(on)
    second = "exp_avg_sq"
    if "amsgrad" in on:
        yield "max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)"
        second = "max_exp_avg_sq"
    yield f"param = param - rate * exp_avg / (sqrt({second}) * unbiased + eps)"


def _lamb_scalars(_: Flags) -> Iterator[str]:
    yield "new1 = 1 - beta1"
    yield "new2 = 1 - beta2"
    yield "unbiased1 = 1 / (1 - pow(beta1, step))"
    yield "unbiased2 = 1 / (1 - pow(beta2, step))"


def _direction(on: Flags) -> Iterator[str]:
    decay = " + weight_decay * param" if "weight_decay" in on else ""
    yield f"direction = exp_avg * unbiased1 / (sqrt(exp_avg_sq * unbiased2) + eps){decay}"


def _lamb_before(on: Flags) -> Iterator[str]:
    yield from _moments(on)
    yield from _direction(on)


def _lamb_ratios(_: Flags) -> Iterator[str]:
    both = "(norm_param > 0) & (norm_direction > 0)"
    yield f"rate = lr * where({both}, norm_param / norm_direction, 1)"


def _lamb(on: Flags) -> Iterator[str]:
    yield from _direction(on)
    yield "param = param - rate * direction"


def _lars_ratios(on: Flags) -> Iterator[str]:
    below = "(norm_grad + weight_decay * norm_param + epsilon)"
    trust = f"where((norm_param > 0) & (norm_grad > 0), eeta * norm_param / {below}, 1)"
    yield f"rate = lr * {trust}" if "lars" in on else "rate = lr"


_ADAM = Formula(
    numbers=("lr", "beta1", "beta2", "eps", "weight_decay"),
    flags=("maximize", "weight_decay", "amsgrad", "decoupled_weight_decay"),
    state=_adam_state,
    scalars=_adam_scalars,
    update=_adam,
)
FORMULAS = {
    "SGD": Formula(
        numbers=("lr", "momentum", "dampening", "weight_decay"),
        flags=("maximize", "weight_decay", "momentum", "nesterov"),
        state=_sgd_state,
        scalars=_sgd_scalars,
        update=_sgd,
        counts=False,
    ),
    "Adagrad": Formula(
        numbers=("lr", "lr_decay", "eps", "weight_decay"),
        flags=("maximize", "weight_decay"),
        state=lambda _: ("sum",),
        scalars=_adagrad_scalars,
        update=_adagrad,
    ),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Lamb": Formula(  # arXiv:1904.00962, algorithm 2
        numbers=("lr", "beta1", "beta2", "eps", "weight_decay"),
        flags=("weight_decay",),
        state=lambda _: ("exp_avg", "exp_avg_sq"),
        scalars=_lamb_scalars,
        update=_lamb,
        norms=("param", "direction"),
        before=_lamb_before,
        ratios=_lamb_ratios,
    ),
    "Lars": Formula(  # arXiv:1708.03888
        numbers=("lr", "momentum", "dampening", "weight_decay", "eeta", "epsilon"),
        flags=("weight_decay", "momentum", "lars"),
        state=_sgd_state,
        scalars=_sgd_scalars,
        update=_sgd,
        counts=False,
        norms=("param", "grad"),
        ratios=_lars_ratios,
    ),
}
