"""Settings that scripts of IPEX put on a model's config, and what becomes of each."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("IPEX")

LATENCY, LAST_LOGITS = "token_latency", "lm_head_generation"

# Settings without effect here, and what replaces them.
REPLACED: Mapping[str, str] = {
    "kv_cache_dtype": (
        "caches hold the dtype that the model computes in; transformers has smaller ones by"
        ' generate(cache_implementation="quantized"), which run eagerly'
    ),
    "text_max_length": (
        "caches are as long as a call needs; generation_config.max_cache_len sets one length for"
        " all calls"
    ),
    "use_fused_moe": "kernels of experts are chosen when code is compiled",
}


def log_replaced(config: Any) -> None:
    """Log one line for each setting of `config` that has no effect."""
    for name, note in REPLACED.items():
        value = getattr(config, name, None)
        if value not in (None, False):
            log.warning("config.%s = %s has no effect: %s", name, value, note)


def is_on(config: Any, name: str) -> bool:
    """Return whether a setting of `config` is there and true."""
    return bool(getattr(config, name, False))


class TokenTimes:
    """A stopping criterion that stops nothing and records the seconds that each step took.

    The first step includes all that `generate` does before it.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Any, **words: Any) -> Tensor:
        """Record a step, and return False for each text."""
        if input_ids.device.type != "cpu":
            torch.accelerator.synchronize(input_ids.device)
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
