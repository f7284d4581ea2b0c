"""Families of models that need a word of their own: a row and its reason.

All other decoders of transformers are optimized by one path: compiled code, static caches and
prompts in chunks. A row is found by the module of a class, so models made from configs have it too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """How models of one family run.

    Args:
        reason: why they run eagerly with caches that grow, "" if they are compiled.
        when: whether the row is about a model of this config.
    """

    reason: str = ""
    when: Callable[[Any], bool] | None = None

    @property
    def is_eager(self) -> bool:
        """Return whether the family is not compiled."""
        return bool(self.reason)


COMPILED = Family()


def has_alibi(config: Any) -> bool:
    """Return whether attention adds ALiBi to its scores."""
    return bool(getattr(config, "alibi", False))


# By the last part of the module of a model's class: modeling_<family>.
ROWS: dict[str, Family] = {
    "falcon": Family(
        "static caches of transformers fail for Falcon with ALiBi (4.57 to 5.24)",
        when=has_alibi,
    ),
    "git": Family("Git reads values of tensors in branches, and takes no static cache before 5.24"),
    "mpt": Family("MPT's attention reads the cache's length as a number, so each layer is cut"),
}


def find(model: Any) -> Family | None:
    """Return the family of `model`, None if it is no model that generates text."""
    for kind in type(model).__mro__:
        name = kind.__module__.rpartition(".")[2].removeprefix("modeling_")
        row = ROWS.get(name)
        if row and (row.when is None or row.when(getattr(model, "config", None))):
            return row
    return COMPILED if is_generating(model) else None


def is_generating(model: Any) -> bool:
    """Return whether `model` has what `generate` of transformers needs."""
    names = ("generate", "prepare_inputs_for_generation", "_prepare_cache_for_generation")
    return all(callable(getattr(model, name, None)) for name in names) and hasattr(model, "config")
