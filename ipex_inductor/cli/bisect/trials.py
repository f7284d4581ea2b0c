"""The runs of `ipex-inductor bisect`: a model compiled with some rules off, checked or timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ipex_inductor import compat
from ipex_inductor.cli.bisect.search import REST, Finding, Outcome, Parts
from ipex_inductor.cli.demo.measure import fp64_output, time_rounds
from ipex_inductor.errors import IpexError
from ipex_inductor.inspection.capture_reports import compile_reporting, restore_tensors
from ipex_inductor.passes.attention import decode_attention, masks
from ipex_inductor.passes.joint import RULE_NAMES
from ipex_inductor.passes.layout import channels_last
from ipex_inductor.passes.training import foreach, moments, pool
from ipex_inductor.passes.weights import plain, upcast
from ipex_inductor.reporting.decisions import GraphReport

PROLOGUE = "weight preprocessing"
OTHERS = {
    rule.NAME for rule in (channels_last, decode_attention, foreach, moments, plain, pool, upcast)
} | {PROLOGUE}
PARTS = RULE_NAMES | masks.NAMES | OTHERS
TOGETHER = "all of them together"

# The tolerance of torch's own benchmarks; it bounds the distance from an fp64 reference.
TOLERANCE = {1: 1e-1, 2: 1e-2}  # by bytes per element

Say = Callable[[str], None]


def options_without(off: Parts) -> dict[str, Any]:
    """Return the options of `torch.compile` that switch off the parts `off`."""
    rules = sorted(off - {PROLOGUE})
    options: dict[str, Any] = {"rules": ",".join(f"-{name}" for name in rules)} if rules else {}
    return options | ({"weight_prologue": False} if {PROLOGUE, REST} & off else {})


class Trial:
    """A model and its inputs, compiled repeatedly with different parts switched off."""

    def __init__(
        self, model: torch.nn.Module, inputs: tuple[Any, ...], mode: str | None, say: Say
    ) -> None:
        self._model, self._inputs, self._mode, self._say = model, inputs, mode, say
        self._eager: Any = None
        self._truth: Any = None

    def check(self, off: Parts | None) -> Outcome:
        """Compile with the parts `off` and check the result as `torch._dynamo.utils.same` does.

        None stands for plain Inductor. An exception of the compiled model counts as a bad result;
        an `IpexError` is raised.
        """
        self._say(_without(off))
        if self._eager is None:
            self._eager, self._truth = self._call(self._model), self._reference()
        reports: list[GraphReport] = []
        torch.compiler.reset()
        try:
            _, result = self._compile(off, reports)
        except IpexError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            return Outcome(
                True, _find_applied_parts(reports), f"it raises {type(error).__name__}: {text}"
            )
        detail = difference(self._eager, result, self._truth)
        return Outcome(detail is not None, _find_applied_parts(reports), detail or "")

    def find_slow(self, percent: float, seconds: float) -> tuple[Finding, dict[str, float]]:
        """Return the parts without which the model is over `percent` faster, and all ratios.

        Parts are timed one at a time against the whole, interleaved; the ratios are those of the
        minima. A part over the limit is timed again and must be over it again.
        """
        reports: list[GraphReport] = []
        torch.compiler.reset()
        self._say(_without(Parts()))
        self._compile(Parts(), reports)
        candidates: dict[str, Parts | None] = {
            p: Parts({p}) for p in sorted(_find_applied_parts(reports))
        }
        candidates |= {TOGETHER: None}
        ratios = {name: self._slowdown(off, seconds) for name, off in candidates.items()}
        limit = 1 + percent / 100
        for name in (name for name, ratio in ratios.items() if ratio > limit):
            ratios[name] = min(ratios[name], self._slowdown(candidates[name], seconds))
        slow = [name for name, ratio in ratios.items() if ratio > limit]
        if not slow:
            return Finding("fine"), ratios
        single = [name for name in slow if name != TOGETHER]
        culprits = tuple((name,) for name in single) or (
            tuple(sorted(_find_applied_parts(reports))),
        )
        detail = "; ".join(f"{name} costs {ratios[name] - 1:.0%}" for name in single or slow)
        return Finding("found", culprits, Parts(p for c in culprits for p in c), detail), ratios

    def _slowdown(self, off: Parts | None, seconds: float) -> float:
        """Return the time with every part on, divided by the time without `off`."""
        self._say(f"timing {_without(off)}")
        torch.compiler.reset()
        whole, less = (self._compile(parts, [])[0] for parts in (Parts(), off))
        calls = {"whole": lambda: whole(*self._inputs), "less": lambda: less(*self._inputs)}
        tensors = _tensors((self._inputs, list(self._model.parameters())))
        with torch.no_grad(), restore_tensors(list(self._model.buffers())):
            times = time_rounds(calls, seconds, tensors[0].device)
        return float(times["whole"]["min_ms"] / times["less"]["min_ms"])

    def _compile(
        self, off: Parts | None, reports: list[GraphReport]
    ) -> tuple[Callable[..., Any], Any]:
        """Return the compiled model and its first result; `off` None is plain Inductor."""
        run: Callable[..., Any]
        if off is None:
            run = torch.compile(self._model, mode=self._mode)
        else:
            run = compile_reporting(
                self._model, reports, mode=self._mode, options=options_without(off)
            )
        with compat.graph_caches_off():
            return run, self._call(run)

    def _call(self, run: Callable[..., Any]) -> Any:
        buffers = list(self._model.buffers())
        with torch.no_grad(), restore_tensors(buffers):
            torch.manual_seed(0)
            return _clone_tensors(run(*_clone_tensors(self._inputs)))

    def _reference(self) -> Any:
        """Return the result in float64, or None for a model that cannot be run in it."""
        try:
            with torch.no_grad(), restore_tensors([]):
                torch.manual_seed(0)
                return fp64_output(self._model, self._inputs)
        except Exception as error:
            self._say(f"no float64 reference ({type(error).__name__}: {error})")
            return None


def difference(eager: Any, got: Any, truth: Any) -> str | None:
    """Return what is wrong with `got`, None if it is as near to the float64 `truth` as eager is."""
    from torch._dynamo.utils import same

    eager_tensors, result_tensors, exact = map(_tensors, (eager, got, truth))
    if [(t.shape, t.dtype) for t in result_tensors] != [(t.shape, t.dtype) for t in eager_tensors]:
        return "the shapes or dtypes of the outputs differ from eager's"
    messages: list[str] = []
    narrowest = min((t.element_size() for t in eager_tensors if t.is_floating_point()), default=8)
    right = same(
        eager_tensors,
        result_tensors,
        fp64_ref=None if truth is None else exact,
        tol=TOLERANCE.get(narrowest, 1e-4),
        equal_nan=True,
        log_error=lambda text, *args, **_: messages.append(text % args),
    )
    return None if right else "; ".join(messages) or "the values differ from eager's"


def _find_applied_parts(reports: list[GraphReport]) -> Parts:
    """Return the applied rules, with the weight preprocessing if it was applied."""
    events = (e for graph in reports for e in graph.events if e.kind in ("fired", "hoisted"))
    return Parts(e.subject for e in events) & PARTS


def _without(off: Parts | None) -> str:
    """Return a description of the parts that stay on."""
    if off is None:
        return "plain Inductor"
    on = PARTS - off
    if not on:
        return "without any rule or the weight preprocessing"
    if len(on) < len(off):
        return f"with {', '.join(sorted(on))} only"
    return f"without {', '.join(sorted(off))}" if off else "with everything on"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _clone_tensors(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)
