"""The runs of `ipex-inductor bisect`: a model compiled with some rules off, checked or timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ipex_inductor import compat
from ipex_inductor.cli.bisect_search import REST, Finding, Outcome, Parts
from ipex_inductor.cli.demo_measure import fp64_output, time_rounds
from ipex_inductor.errors import IpexError
from ipex_inductor.inspection.capture_reports import compiled, unchanged
from ipex_inductor.passes.attention import masks
from ipex_inductor.passes.joint import RULE_NAMES
from ipex_inductor.passes.layout import channels_last
from ipex_inductor.passes.training import foreach, moments, pool
from ipex_inductor.passes.weights import plain, upcast
from ipex_inductor.reporting.decisions import GraphReport

PROLOGUE = "weight prologue"
OTHERS = {m.NAME for m in (channels_last, foreach, moments, plain, pool, upcast)} | {PROLOGUE}
PARTS = RULE_NAMES | masks.NAMES | OTHERS
TOGETHER = "all of them together"

# As torch's own benchmarks have it; with an fp64 reference it bounds the distance from that.
TOLERANCE = {1: 1e-1, 2: 1e-2}  # by bytes an element

Say = Callable[[str], None]


def options_without(off: Parts) -> dict[str, Any]:
    """The options of `torch.compile` that switch these parts off."""
    rules = sorted(off - {PROLOGUE})
    options: dict[str, Any] = {"rules": ",".join(f"-{name}" for name in rules)} if rules else {}
    return options | ({"weight_prologue": False} if {PROLOGUE, REST} & off else {})


class Trial:
    """A model on its inputs, to be compiled again and again with other parts off."""

    def __init__(
        self, model: torch.nn.Module, inputs: tuple[Any, ...], mode: str | None, say: Say
    ) -> None:
        self._model, self._inputs, self._mode, self._say = model, inputs, mode, say
        self._eager: Any = None
        self._truth: Any = None

    def check(self, off: Parts | None) -> Outcome:
        """Whether the result is wrong, by the rule of `torch._dynamo.utils.same`."""
        self._say(_without(off))
        if self._eager is None:
            self._eager, self._truth = self._call(self._model), self._reference()
        seen: list[GraphReport] = []
        torch.compiler.reset()
        try:
            _, got = self._compile(off, seen)
        except IpexError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            return Outcome(True, _fired(seen), f"it raises {type(error).__name__}: {text}")
        detail = difference(self._eager, got, self._truth)
        return Outcome(detail is not None, _fired(seen), detail or "")

    def find_slow(self, percent: float, seconds: float) -> tuple[Finding, dict[str, float]]:
        """The parts without which the model is faster by more than `percent`.

        One at a time against the whole, interleaved; the ratios of the minima are returned too.
        Who is over the limit is timed again, and must be over it again.
        """
        seen: list[GraphReport] = []
        torch.compiler.reset()
        self._say(_without(Parts()))
        self._compile(Parts(), seen)
        candidates: dict[str, Parts | None] = {p: Parts({p}) for p in sorted(_fired(seen))}
        candidates |= {TOGETHER: None}
        ratios = {name: self._slowdown(off, seconds) for name, off in candidates.items()}
        limit = 1 + percent / 100
        for name in (name for name, ratio in ratios.items() if ratio > limit):
            ratios[name] = min(ratios[name], self._slowdown(candidates[name], seconds))
        slow = [name for name, ratio in ratios.items() if ratio > limit]
        if not slow:
            return Finding("fine"), ratios
        single = [name for name in slow if name != TOGETHER]
        culprits = tuple((name,) for name in single) or (tuple(sorted(_fired(seen))),)
        detail = "; ".join(f"{name} costs {ratios[name] - 1:.0%}" for name in single or slow)
        return Finding("found", culprits, Parts(p for c in culprits for p in c), detail), ratios

    def _slowdown(self, off: Parts | None, seconds: float) -> float:
        """Time with everything on over time without `off`."""
        self._say(f"timing {_without(off)}")
        torch.compiler.reset()
        whole, less = (self._compile(parts, [])[0] for parts in (Parts(), off))
        calls = {"whole": lambda: whole(*self._inputs), "less": lambda: less(*self._inputs)}
        tensors = _tensors((self._inputs, list(self._model.parameters())))
        with torch.no_grad(), unchanged(list(self._model.buffers())):
            times = time_rounds(calls, seconds, tensors[0].device)
        return float(times["whole"]["min_ms"] / times["less"]["min_ms"])

    def _compile(
        self, off: Parts | None, seen: list[GraphReport]
    ) -> tuple[Callable[..., Any], Any]:
        """The compiled model and the result of its first call; None for plain Inductor."""
        run: Callable[..., Any]
        if off is None:
            run = torch.compile(self._model, mode=self._mode)
        else:
            run = compiled(self._model, seen, mode=self._mode, options=options_without(off))
        with compat.graph_caches_off():
            return run, self._call(run)

    def _call(self, run: Callable[..., Any]) -> Any:
        buffers = list(self._model.buffers())
        with torch.no_grad(), unchanged(buffers):
            torch.manual_seed(0)
            return _cloned(run(*_cloned(self._inputs)))

    def _reference(self) -> Any:
        """The result in float64, or None for a model that cannot be run so."""
        try:
            with torch.no_grad(), unchanged([]):
                torch.manual_seed(0)
                return fp64_output(self._model, self._inputs)
        except Exception as error:
            self._say(f"no float64 reference ({type(error).__name__}: {error})")
            return None


def difference(eager: Any, got: Any, truth: Any) -> str | None:
    """What is wrong with `got`, None if it is as near to the float64 `truth` as eager's result."""
    from torch._dynamo.utils import same

    theirs, ours, exact = map(_tensors, (eager, got, truth))
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in theirs]:
        return "the shapes or dtypes of the outputs differ from eager's"
    said: list[str] = []
    narrowest = min((t.element_size() for t in theirs if t.is_floating_point()), default=8)
    right = same(
        theirs,
        ours,
        fp64_ref=None if truth is None else exact,
        tol=TOLERANCE.get(narrowest, 1e-4),
        equal_nan=True,
        log_error=lambda text, *args, **_: said.append(text % args),
    )
    return None if right else "; ".join(said) or "the values differ from eager's"


def _fired(seen: list[GraphReport]) -> Parts:
    """The rules that fired, and the weight prologue where there was one."""
    events = (e for graph in seen for e in graph.events if e.kind in ("fired", "hoisted"))
    return Parts(e.subject for e in events) & PARTS


def _without(off: Parts | None) -> str:
    if off is None:
        return "plain Inductor"
    on = PARTS - off
    if not on:
        return "without any rule or the weight prologue"
    if len(on) < len(off):
        return f"with {', '.join(sorted(on))} only"
    return f"without {', '.join(sorted(off))}" if off else "with everything on"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _cloned(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)
