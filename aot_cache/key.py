"""Cache keys of kernels: everything that the code depends on, by name.

A key is written into its entry and read back, so that a miss can be explained by the field that
differs from the nearest entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

from ipex_inductor.aot_cache.digest import digest_framed, frame_fields, unframe_fields

Value = Any  # str, int, bool, float, None, bytes, or tuples of these
Pairs = tuple[tuple[str, Value], ...]  # named values in the order given


@dataclass(frozen=True)
class Key:
    """The fields of a key, in framing order; `TypeError` for values that cannot be framed.

    Two keys are equal if and only if their digests are.
    """

    kind: str  # "cubin", "hsaco", "zebin", "spirv", "cpp", ...
    source: str  # `digest.source_digest()`
    tables: Pairs  # digests of the templates and tables that took part, by name
    options: Pairs  # of the user and of the template: tile sizes, warps, stages, ...
    problem: Pairs  # operands: shapes or classes of them, strides, dtypes, constants
    architecture: (
        str  # what the code is for: `str(Target)`, or its `arch` if any such device runs it
    )
    toolkit: Pairs  # ptxas, lld, IGC or g++: paths, versions, flags
    triton: str  # version, "" where it takes no part
    torch: str  # version and build: "2.13.0+cu130"
    environment: Pairs  # `env_fingerprint.environment()`

    # Made at once, not when asked for: a fork could leave the lock of `cached_property` held.
    framed: bytes = field(init=False, repr=False, compare=False)  # the fields, as entries hold them
    digest: str = field(init=False, repr=False, compare=False)  # SHA-256, the entry's name

    def __post_init__(self) -> None:
        for name in _TEXTS:
            if type(getattr(self, name)) is not str:
                raise TypeError(f"field {name!r}: expected str, got {getattr(self, name)!r}")
        for name in _PAIRS:
            _check_pairs(name, getattr(self, name))
        object.__setattr__(self, "framed", frame_fields(self.fields))
        object.__setattr__(self, "digest", digest_framed(self.framed))

    @property
    def fields(self) -> dict[str, Value]:
        """Return the fields by name, in framing order."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(f.name for f in fields(Key) if f.init)
_PAIRS = tuple(f.name for f in fields(Key) if f.init and f.type == "Pairs")
_TEXTS = tuple(f.name for f in fields(Key) if f.init and f.type == "str")

# Texts for fields with one value; {there} is the entry's value, {here} ours.
_WORDS = {
    "architecture": "built for {there}, running on {here}",
    "source": "built by other sources of ipex_inductor",
}


def pairs(values: Mapping[str, Value]) -> Pairs:
    """Return named values in the form that keys take, ordered by name."""
    return tuple(sorted(values.items()))


def describe_differences(wanted: Key, stored: Mapping[str, Value]) -> tuple[str, ...]:
    """Return how `wanted` differs from the fields of an entry, for the user; () if it does not.

    `stored` may come from another version of this package, with unknown fields.
    """
    return tuple(_differences(wanted.fields, stored))


def nearest(
    wanted: Key, entries: Iterable[Mapping[str, Value]]
) -> tuple[Mapping[str, Value], tuple[str, ...]] | None:
    """Return the entry's fields with the fewest differences from `wanted`, and the differences.

    `entries`: fields of keys, as `Store.keys` yields them. Only entries of that kind count; None if
    there is none.
    """
    same_kind = (stored for stored in entries if stored.get("kind") == wanted.kind)
    candidates = ((stored, describe_differences(wanted, stored)) for stored in same_kind)
    return min(candidates, key=lambda pair: len(pair[1]), default=None)


def read(framed: bytes) -> dict[str, Value]:
    """Return the fields in an entry, whichever version wrote it; raise `ValueError` if invalid."""
    key_fields = unframe_fields(framed)
    if type(key_fields.get("kind")) is not str:
        raise ValueError("not a key: no kind")
    return key_fields


def _differences(wanted: Mapping[str, Value], stored: Mapping[str, Value]) -> Iterator[str]:
    """Yield a text for each field that differs."""
    for name in dict.fromkeys([*wanted, *stored]):
        ours, theirs = wanted.get(name), stored.get(name)
        if _same(ours, theirs):
            continue
        if name in _PAIRS and _is_pairs(ours) and _is_pairs(theirs):
            yield from _pair_differences(name, ours, theirs)
        elif name in _WORDS:
            yield _WORDS[name].format(here=ours, there=theirs)
        else:
            yield f"{name}: {_format_value(ours)} here, {_format_value(theirs)} there"


def _pair_differences(field: str, wanted: Pairs, stored: Pairs) -> Iterator[str]:
    """Yield a text for each named value of a field that differs."""
    ours, theirs = dict(wanted), dict(stored)
    keys = dict.fromkeys([*ours, *theirs])
    changed = [n for n in keys if n not in ours or n not in theirs or not _same(ours[n], theirs[n])]
    for name in changed:
        prefix = name if field == "environment" else f"{field}: {name}"
        mine = _format_value(ours[name]) if name in ours else "unset"
        other_value = _format_value(theirs[name]) if name in theirs else "unset"
        yield f"{prefix}={mine} here, {other_value} there"
    if not changed:
        yield f"{field}: in another order"


def _same(one: Value, two: Value) -> bool:
    """Return whether two values are exactly equal: 1 is not True, 0.0 is not -0.0."""
    return frame_fields({"": one}) == frame_fields({"": two})


def _format_value(value: Value) -> str:
    """Return a value for display."""
    return value if isinstance(value, str) and value else repr(value)


def _is_pairs(value: Value) -> TypeGuard[Pairs]:
    """Return whether a value is a tuple of pairs that begin with a name."""
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


def _check_pairs(name: str, value: Value) -> None:
    """Raise `TypeError` unless a field holds pairs with distinct names."""
    if not _is_pairs(value):
        raise TypeError(f"field {name!r}: expected pairs of a name and a value, got {value!r}")
    if len({pair[0] for pair in value}) != len(value):
        raise TypeError(f"field {name!r}: a name stands twice in {value!r}")
