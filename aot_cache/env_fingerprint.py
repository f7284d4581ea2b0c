"""Environment variables and settings that may change generated code, and their values.

env_fingerprint.toml lists for every name what it changes, or why it cannot change cached code.
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
    """Names by class, each with its reason.

    Unlisted names that begin with one of `prefixes` are part of the key. Names in `host` are part
    of the key too, but only for CPU code.
    """

    key: Mapping[str, str]
    neutral: Mapping[str, str]
    settings_key: Mapping[str, str]
    settings_neutral: Mapping[str, str]
    prefixes: tuple[str, ...]
    host: frozenset[str]

    def in_key(self, name: str, host: bool = True) -> bool:
        """Return whether the value of this environment variable is part of keys."""
        if name in self.host:
            return host
        return name in self.key or (name not in self.neutral and name.startswith(self.prefixes))


@functools.cache
def census() -> Census:
    """Return the contents of env_fingerprint.toml."""
    file = tomllib.loads(Path(__file__).with_name("env_fingerprint.toml").read_text("utf-8"))
    settings = file["settings"]
    return Census(
        key=file["key"],
        neutral=file["neutral"],
        settings_key=settings["key"],
        settings_neutral=settings["neutral"],
        prefixes=tuple(file["prefixes"]),
        host=frozenset(file["host"]),
    )


def environment(env: Mapping[str, str] = os.environ, host: bool = True) -> Pairs:
    """Return the variables that are set and may change code, as spelled: unset is not "0".

    Without `host`, only the variables that may change what Triton compiles for a GPU.
    """
    names = census()
    return pairs({name: value for name, value in env.items() if names.in_key(name, host)})


def triton_settings() -> Pairs:
    """Return the Triton knobs that this program set itself, where they may change code.

    Knobs set through the environment are not included. Raises `TypeError` for a value that has no
    exact digest, such as a hook that adds passes: code compiled under it cannot be cached.
    """
    knobs = sys.modules.get("triton.knobs")
    return pairs(dict(_set_on(knobs)) if knobs else {})


def inductor_settings() -> Pairs:
    """Return the digest of Inductor's whole config, computed as its own caches do."""
    from torch._inductor import config

    digest = config.get_hash()
    return (("torch._inductor.config", digest),)


def _set_on(knobs: Any) -> Iterator[tuple[str, object]]:
    """Yield the name and value of each Triton knob that is set and may change code."""
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
    """Yield knobs that hold values read from the environment when Triton was imported."""
    for name, value in vars(group).items():
        if value and type(value) in (bool, int, str) and not name.startswith("_"):
            yield f"triton.knobs.{group_name}.{name} at import", value
