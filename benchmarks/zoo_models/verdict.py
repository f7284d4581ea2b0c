"""Whether what a compiled model computes is right: held against fp64, laid out as by eager."""

import math
from dataclasses import dataclass

from torch import Tensor

from ipex_inductor.autotune.measure import SAME

# Of the rule of `torch._dynamo.utils.same`: so many times eager's error, and a tenth of its
# tolerance. A tensor of few elements may be off by more than all of its group together.
SHARES = {"fp32": 2.0, "bf16": 3.0, "fp16": 3.0}
FLOORS, ONE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}, 10.0
FEW, FEW_SHARE = 1000, 3.0  # elements below which errors scatter
# Gradients that are zero but for rounding (of a bias before a norm) have no relative error, so a
# tensor counts as at least so large, relative to the largest of its group.
LEAST = 1e-2
Groups = dict[str, list[Tensor]]


def root_mean_square(x: Tensor) -> float:
    """Return the size of a tensor."""
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


@dataclass(frozen=True)
class Verdict:
    """How far results are from fp64: the worst group's error, its limit, and what is wrong."""

    error: float
    limit: float
    wrong: str = ""

    @classmethod
    def of(cls, found: Groups, eager: Groups, exact: Groups, dtype: str) -> "Verdict":
        """Judge all groups; the one nearest to its limit speaks for them."""
        verdicts = [_judged(n, found[n], eager[n], exact[n], dtype) for n in exact if n in found]
        if missing := [name for name in eager if len(found.get(name, ())) != len(eager[name])]:
            return cls(math.inf, 0.0, f"number of {', '.join(missing)} differs from eager's")
        wrong = "; ".join(v.wrong for v in verdicts if v.wrong)
        worst = max(verdicts, key=lambda v: v.error / v.limit)
        return cls(worst.error, worst.limit, wrong)


def _judged(
    name: str, found: list[Tensor], eager: list[Tensor], exact: list[Tensor], dtype: str
) -> Verdict:
    largest = max(map(root_mean_square, exact))
    sizes = [max(root_mean_square(x), LEAST * largest, 1e-30) for x in exact]
    counts = [x.numel() for x in exact]
    errors, near = (
        [root_mean_square(a.double() - b) / s for a, b, s in zip(those, exact, sizes, strict=True)]
        if [a.shape for a in those] == [b.shape for b in exact]
        else [math.inf] * len(exact)
        for those in (found, eager)
    )
    error, eager_error = (_pooled(each, counts) for each in (errors, near))
    share = SHARES[dtype] if sum(counts) >= FEW else FEW_SHARE
    limit = share * eager_error + FLOORS[dtype]
    wrong = [] if error <= limit else [f"{name} off by {error:.2g}, allowed {limit:.2g}"]
    for place, (one, near_one) in enumerate(zip(errors, near, strict=True)):
        allowed = max(FEW_SHARE * near_one, ONE * limit)
        wrong += [] if one <= allowed else [f"{name}[{place}] off by {one:.2g}"]
    for place, (a, b) in enumerate(zip(found, eager, strict=True)):
        for what, of in SAME.items():
            wrong += [] if of(a) == of(b) else [f"{name}[{place}]: {what} {of(a)}, not {of(b)}"]
    return Verdict(error, limit, "; ".join(wrong[:4]))


def _pooled(errors: list[float], counts: list[int]) -> float:
    squares = sum(n * e * e for n, e in zip(counts, errors, strict=True))
    return math.sqrt(squares / max(sum(counts), 1))
