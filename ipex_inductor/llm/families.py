"""Families of models that need a word of their own: a row and its reason.

All other decoders of transformers are optimized by one path: compiled code, static caches and
prompts in chunks. A row is found by the module of a class, so models made from configs have it too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """How models of one family run.

    Args:
        reason: why they run eagerly with caches that grow, "" if they are compiled.
        when: whether the row is about a model of this config.
        whole: why a prompt of several chunks is not cut, "" if it may be.
    """

    reason: str = ""
    when: Callable[[Any], bool] | None = None
    whole: str = ""

    @property
    def is_eager(self) -> bool:
        """Return whether the family is not compiled."""
        return bool(self.reason)


COMPILED = Family()


def has_alibi(config: Any) -> bool:
    """Return whether attention adds ALiBi to its scores."""
    return bool(getattr(config, "alibi", False))


def has_cross_attention(config: Any) -> bool:
    """Return whether some layers of the decoder attend to pictures."""
    return bool(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None))


# By the last part of the module of a model's class: modeling_<family>.
ROWS: dict[str, Family] = {
    "falcon": Family(
        "static caches of transformers fail for Falcon with ALiBi (4.57 to 5.24)",
        when=has_alibi,
    ),
    "mllama": Family(
        "Mllama's layers that attend to pictures need caches of another length than the others",
        when=has_cross_attention,
    ),
    "git": Family("Git reads values of tensors in branches, and takes no static cache before 5.24"),
    "mpt": Family("MPT's attention reads the cache's length as a number, so each layer is cut"),
    # Families whose code is published beside their weights.
    "qwen": Family(whole="the base of its rotary frequencies grows with the text"),
    "yuan_hf_model": Family("Yuan keeps tokens of its convolutions beside the cache"),
}
# Rotary embeddings of transformers whose frequencies depend on the length of the text.
GROWING_ROTARY = ("dynamic", "longrope", "su")


def find(model: Any) -> Family | None:
    """Return the family of `model`, None if it is no model that generates text."""
    for kind in type(model).__mro__:
        name = kind.__module__.rpartition(".")[2].removeprefix("modeling_")
        row = ROWS.get(name)
        if row and (row.when is None or row.when(getattr(model, "config", None))):
            return row
    return COMPILED if is_generating(model) else None


def why_not_cut(family: Family, config: Any) -> str:
    """Return why a prompt must be computed at once, not chunk by chunk, "" if it need not.

    Args:
        family: the row of the model.
        config: of its decoder.
    """
    if family.whole:
        return family.whole
    for name in ("rope_parameters", "rope_scaling"):
        kinds = set(_rotary_kinds(getattr(config, name, None)))
        if kinds.intersection(GROWING_ROTARY):
            return "its rotary frequencies depend on the length of the text"
    return ""


def _rotary_kinds(settings: Any) -> Iterator[str]:
    """Yield the kinds of rotary embeddings in settings, which may be those of several layers."""
    if not isinstance(settings, Mapping):
        return
    yield str(settings.get("rope_type", settings.get("type", "")))
    for value in settings.values():
        yield from _rotary_kinds(value)


def is_generating(model: Any) -> bool:
    """Return whether `model` has what `generate` of transformers needs."""
    names = ("generate", "prepare_inputs_for_generation", "_prepare_cache_for_generation")
    return all(callable(getattr(model, name, None)) for name in names) and hasattr(model, "config")
