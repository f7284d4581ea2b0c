"""The census of what may change code from outside: environment variables and settings.

env_fingerprint.toml says of every name what it changes, or why it cannot change code that is kept.
"""

import functools
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache.key import Pairs, pairs


@dataclass(frozen=True)
class Census:
    """Names by class, each with its reason; `prefixes` begin names that are in the key unlisted.

    Those of `host` are of the key too, but of code for a CPU alone.
    """

    key: Mapping[str, str]
    neutral: Mapping[str, str]
    settings_key: Mapping[str, str]
    settings_neutral: Mapping[str, str]
    prefixes: tuple[str, ...]
    host: frozenset[str]

    def in_key(self, name: str, host: bool = True) -> bool:
        """Whether the value of this environment variable is part of keys."""
        if name in self.host:
            return host
        return name in self.key or (name not in self.neutral and name.startswith(self.prefixes))


@functools.cache
def census() -> Census:
    """What env_fingerprint.toml says."""
    file = tomllib.loads(Path(__file__).with_name("env_fingerprint.toml").read_text("utf-8"))
    of = file["settings"]
    return Census(
        key=file["key"],
        neutral=file["neutral"],
        settings_key=of["key"],
        settings_neutral=of["neutral"],
        prefixes=tuple(file["prefixes"]),
        host=frozenset(file["host"]),
    )


def environment(env: Mapping[str, str] = os.environ, host: bool = True) -> Pairs:
    """The variables that are set and may change code, as they are spelt: unset is not "0".

    Without `host`, those that may change what Triton compiles for a GPU.
    """
    names = census()
    return pairs({name: value for name, value in env.items() if names.in_key(name, host)})


def triton_settings() -> Pairs:
    """What this program set on Triton's knobs without the environment, where it may change code.

    Raises `TypeError` for a value that has no exact digest, such as a hook that adds passes: what
    is compiled under it cannot be kept.
    """
    knobs = sys.modules.get("triton.knobs")
    return pairs(dict(_set_on(knobs)) if knobs else {})


def inductor_settings() -> Pairs:
    """Inductor's config whole, as its own caches digest it."""
    from torch._inductor import config

    digest = config.get_hash()
    return (("torch._inductor.config", digest),)


def _set_on(knobs: Any) -> Iterator[tuple[str, object]]:
    names = census()
    for group_name, group in vars(knobs).items():
        if not isinstance(group, knobs.base_knobs):
            continue
        by_name = {name: knob.key for name, knob in group.knob_descriptors.items()}
        for name, value in vars(group).items():
            setting = f"{group_name}.{name}"
            if setting in names.settings_neutral or not names.in_key(by_name.get(name, "TRITON_")):
                continue
            if value is not None and type(value) not in (bool, int, str):
                raise TypeError(f"triton.knobs.{setting}: no digest of {type(value).__name__}")
            yield f"triton.knobs.{setting}", value
        yield from _read_at_import(group_name, type(group))


def _read_at_import(group_name: str, group: type) -> Iterator[tuple[str, object]]:
    """Knobs that hold what the environment said when Triton was imported."""
    for name, value in vars(group).items():
        if value and type(value) in (bool, int, str) and not name.startswith("_"):
            yield f"triton.knobs.{group_name}.{name} at import", value
