"""Checkpointed regions: run again with the settings and scales of their first run, uncounted.

The backward runs after the block of `fp8_autocast` has ended and updated the scales. A region that
`torch.utils.checkpoint` runs again has to see what its first run saw.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant import fp8_states
from ipex_inductor.quantization.fp8.current import CURRENT, recomputing

SNAPSHOT = "ipex_fp8_snapshot"  # attribute of a region
NON_REENTRANT = "Call torch.utils.checkpoint.checkpoint with use_reentrant=False."


class Snapshot:
    """Settings of a thread, and the scales of all prepared models."""

    def __init__(self) -> None:
        self.settings = CURRENT.settings()
        self.scales: dict[int, Tensor] = {n: m.scales for n, m in _models().items()}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set them for a block, in which no magnitude is recorded."""
        models = _models()
        current = {n: models[n].scales for n in self.scales if n in models}
        for number in current:
            models[number].scales = self.scales[number]
        try:
            with recomputing(self.settings):
                yield
        finally:
            for number, scales in current.items():
                models[number].scales = scales


class _Forward(AbstractContextManager[None]):
    """Takes the snapshot when the first run of a region begins."""

    snapshot: Snapshot

    def __enter__(self) -> None:
        self.snapshot = Snapshot()

    def __exit__(self, *_: object) -> None:
        return None


class _Recompute(AbstractContextManager[None]):
    """Restores the snapshot of the first run."""

    def __init__(self, forward: _Forward) -> None:
        self.forward = forward
        self.restored: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self.restored.append(self.forward.snapshot.restored())
        self.restored[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self.restored.pop().__exit__(*error)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return both contexts of a checkpointed region: pass this function as `context_fn`.

    `checkpoint(function, x, use_reentrant=False, context_fn=checkpoint_contexts)` is needed where
    `function` is compiled: layers that run in eager mode are noticed without it.
    """
    forward = _Forward()
    return forward, _Recompute(forward)


def watch_region() -> None:
    """Let the innermost checkpointed region of this thread run again as it runs now.

    Raises:
        QuantizationError: in a backward outside of such a region, and if a block of
            `fp8_autocast` inside the region has updated scales before.
    """
    region = compat.checkpointed_region()
    if region is None:
        if CURRENT.enabled and not CURRENT.recomputing and compat.backward_number() is not None:
            raise QuantizationError(
                "no layer to run in FP8 inside a backward", "a recomputation", NON_REENTRANT
            )
        return
    if CURRENT.recomputing:
        return
    snapshot: Snapshot | None = getattr(region, SNAPSHOT, None)
    if snapshot is None:
        snapshot = Snapshot()
        setattr(region, SNAPSHOT, snapshot)
        region.recompute_fn = _run_restored(region.recompute_fn, snapshot)
        return
    models = _models() if CURRENT.enabled else {}
    if any(models[n].scales is not s for n, s in snapshot.scales.items() if n in models):
        raise QuantizationError(
            "one outermost fp8_autocast block in a checkpointed region",
            "a second one after scales were updated",
            "Open the block outside of the region.",
        )


def _run_restored(function: Callable[..., Any], snapshot: Snapshot) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with snapshot.restored():
            return function(*args, **kwargs)

    return run


def _models() -> dict[int, Any]:
    return dict(fp8_states.MODELS)
