"""What a kernel is kept under: everything that its code depends on, by name.

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
    """The fields of a key, in the order they are framed; `TypeError` for what cannot be framed.

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
    environment: Pairs  # `knobs.environment()`

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
        """By name, in order."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(f.name for f in fields(Key) if f.init)
_PAIRS = tuple(f.name for f in fields(Key) if f.init and f.type == "Pairs")
_TEXTS = tuple(f.name for f in fields(Key) if f.init and f.type == "str")

# How a difference between one-value fields is said; {there} is the entry's value, {here} ours.
_WORDS = {
    "architecture": "built for {there}, running on {here}",
    "source": "built by other sources of ipex_inductor",
}


def pairs(values: Mapping[str, Value]) -> Pairs:
    """The form that keys take named values in, ordered by name."""
    return tuple(sorted(values.items()))


def differing(wanted: Key, found: Mapping[str, Value]) -> tuple[str, ...]:
    """What sets `wanted` apart from the fields of an entry, in the user's words; () if nothing.

    `found` may come from another version of ours, with fields that we do not know.
    """
    return tuple(_differences(wanted.fields, found))


def nearest(
    wanted: Key, entries: Iterable[Mapping[str, Value]]
) -> tuple[Mapping[str, Value], tuple[str, ...]] | None:
    """Of the fields of entries (`Store.keys`), those with the fewest differences, and these.

    Only entries of the same kind count; None if there is none.
    """
    same_kind = (found for found in entries if found.get("kind") == wanted.kind)
    told = ((found, differing(wanted, found)) for found in same_kind)
    return min(told, key=lambda pair: len(pair[1]), default=None)


def read(framed: bytes) -> dict[str, Value]:
    """The fields in an entry, whichever version of ours wrote it; raises `ValueError`."""
    found = unframe_fields(framed)
    if type(found.get("kind")) is not str:
        raise ValueError("not a key: no kind")
    return found


def _differences(wanted: Mapping[str, Value], found: Mapping[str, Value]) -> Iterator[str]:
    for name in dict.fromkeys([*wanted, *found]):
        here, there = wanted.get(name), found.get(name)
        if _same(here, there):
            continue
        if name in _PAIRS and _is_pairs(here) and _is_pairs(there):
            yield from _pair_differences(name, here, there)
        elif name in _WORDS:
            yield _WORDS[name].format(here=here, there=there)
        else:
            yield f"{name}: {_said(here)} here, {_said(there)} there"


def _pair_differences(field: str, here: Pairs, there: Pairs) -> Iterator[str]:
    ours, theirs = dict(here), dict(there)
    names = dict.fromkeys([*ours, *theirs])
    told = [n for n in names if n not in ours or n not in theirs or not _same(ours[n], theirs[n])]
    for name in told:
        prefix = name if field == "environment" else f"{field}: {name}"
        mine = _said(ours[name]) if name in ours else "unset"
        yield f"{prefix}={mine} here, {_said(theirs[name]) if name in theirs else 'unset'} there"
    if not told:
        yield f"{field}: in another order"


def _same(one: Value, two: Value) -> bool:
    """Exactly: 1 is not True, 0.0 is not -0.0."""
    return frame_fields({"": one}) == frame_fields({"": two})


def _said(value: Value) -> str:
    return value if isinstance(value, str) and value else repr(value)


def _is_pairs(value: Value) -> TypeGuard[Pairs]:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


def _check_pairs(name: str, value: Value) -> None:
    if not _is_pairs(value):
        raise TypeError(f"field {name!r}: expected pairs of a name and a value, got {value!r}")
    if len({pair[0] for pair in value}) != len(value):
        raise TypeError(f"field {name!r}: a name stands twice in {value!r}")
