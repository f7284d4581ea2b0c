"""SHA-256 identities of the package's own sources and of the named fields of a key.

Both frame every value with its type and length, so that no two inputs share one byte string.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ipex_inductor.errors import IpexError

# Listed by name because a walk from ipex_inductor/ does not enter linked rooms, and because an
# editable install may map them elsewhere. A test compares this with the folders and pyproject.
ROOMS = (
    "ipex_inductor",
    "ipex_inductor.aot_cache",
    "ipex_inductor.aot_cache.bundling",
    "ipex_inductor.aot_cache.graph_files",
    "ipex_inductor.autotune",
    "ipex_inductor.autotune.comparison",
    "ipex_inductor.autotune.foreign",
    "ipex_inductor.capture",
    "ipex_inductor.cli",
    "ipex_inductor.cli.autotune",
    "ipex_inductor.cli.bisect",
    "ipex_inductor.cli.cache",
    "ipex_inductor.cli.cache.trust",
    "ipex_inductor.cli.demo",
    "ipex_inductor.cli.doctor",
    "ipex_inductor.cli.llm",
    "ipex_inductor.cli.prebuild",
    "ipex_inductor.compat",
    "ipex_inductor.compat.private_memory",
    "ipex_inductor.compiler",
    "ipex_inductor.cpu",
    "ipex_inductor.frontend",
    "ipex_inductor.inspection",
    "ipex_inductor.ipex_api",
    "ipex_inductor.ipex_api.old_names",
    "ipex_inductor.llm",
    "ipex_inductor.llm.attention",
    "ipex_inductor.llm.checkpoints",
    "ipex_inductor.lowerings",
    "ipex_inductor.lowerings.attention",
    "ipex_inductor.lowerings.common",
    "ipex_inductor.lowerings.conv",
    "ipex_inductor.lowerings.gemm",
    "ipex_inductor.lowerings.optimizer",
    "ipex_inductor.lowerings.pointwise",
    "ipex_inductor.lowerings.problem",
    "ipex_inductor.lowerings.quant",
    "ipex_inductor.lowerings.select",
    "ipex_inductor.lowerings.tune",
    "ipex_inductor.nn",
    "ipex_inductor.ops",
    "ipex_inductor.ops.attention",
    "ipex_inductor.ops.common",
    "ipex_inductor.ops.conv",
    "ipex_inductor.ops.gemm",
    "ipex_inductor.ops.optimizer",
    "ipex_inductor.ops.pointwise",
    "ipex_inductor.ops.quant",
    "ipex_inductor.optim",
    "ipex_inductor.optim.launching",
    "ipex_inductor.optim.optimizers",
    "ipex_inductor.passes",
    "ipex_inductor.passes.attention",
    "ipex_inductor.passes.correctness",
    "ipex_inductor.passes.engine",
    "ipex_inductor.passes.fusion",
    "ipex_inductor.passes.layout",
    "ipex_inductor.passes.optimizer",
    "ipex_inductor.passes.quant",
    "ipex_inductor.passes.restated",
    "ipex_inductor.passes.training",
    "ipex_inductor.passes.weights",
    "ipex_inductor.prebuild",
    "ipex_inductor.quantization",
    "ipex_inductor.quantization.fp8",
    "ipex_inductor.quantization.graphs",
    "ipex_inductor.quantization.weight_only",
    "ipex_inductor.quantization.files",
    "ipex_inductor.reporting",
    "ipex_inductor.runtime",
    "ipex_inductor.target",
    "ipex_inductor.templates",
    "ipex_inductor.templates.build",
    "ipex_inductor.templates.cpu",
    "ipex_inductor.templates.optimizer",
    "ipex_inductor.templates.sycl",
    "ipex_inductor.templates.tensor_reader",
    "ipex_inductor.templates.triton",
)
SUFFIXES = frozenset({".cpp", ".h", ".jinja", ".py", ".toml"})


def sources() -> Iterator[tuple[str, Path]]:
    """Yield every source file with the name of its package, ordered by the two names."""
    for room in sorted(ROOMS):
        spec = find_spec(room)
        if spec is None or not spec.submodule_search_locations:
            advice = "Reinstall ipex-inductor: its folders were moved or removed."
            raise IpexError(f"the package {room}", "nothing importable by that name", advice)
        files = (
            file for folder in spec.submodule_search_locations for file in Path(folder).iterdir()
        )
        for file in sorted(files, key=lambda f: f.name):
            if file.suffix in SUFFIXES and file.is_file():
                yield room, file


@functools.cache
def source_digest() -> str:
    """Return the identity of this package's sources, equal in checkout, editable and wheel."""
    whole = hashlib.sha256(b"ipex_inductor sources 1\n")
    for room, file in sources():
        whole.update(_frame((room, file.name, file.read_bytes())))
    return whole.hexdigest()


def digest_fields(fields: Mapping[str, object]) -> str:
    """Return the identity of named fields in the order given.

    Values are str, int, bool, float, None, bytes, or tuples of these; anything else (subclasses
    too) raises `TypeError`, because what cannot be framed exactly cannot be part of a key.
    """
    return digest_framed(frame_fields(fields))


def digest_framed(framed: bytes) -> str:
    """Return the value of `digest_fields` for fields that `frame_fields` has framed."""
    return hashlib.sha256(b"ipex_inductor fields 1\n" + framed).hexdigest()


def frame_fields(fields: Mapping[str, object]) -> bytes:
    """Return named fields as unambiguous bytes; raise `TypeError` as `digest_fields` does."""
    parts = []
    for name, value in fields.items():
        try:
            parts.append(_frame((name, value)))
        except KeyError as error:
            raise TypeError(f"field {name!r}: no digest of {error.args[0].__name__}") from None
    return b"".join(parts)


def unframe_fields(framed: bytes) -> dict[str, Any]:
    """Return the fields that `frame_fields` framed; raise `ValueError` for any other bytes."""
    try:
        fields = dict(_unframe(framed, _DEPTH))
        whole = frame_fields(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not framed fields: {error}") from None
    if whole != framed:  # a name twice, or a spelling of a value that is not ours
        raise ValueError("not framed fields: made by something else")
    return fields


def _frame(value: object) -> bytes:
    """Return type tag, length of the payload, payload; one-to-one over all values."""
    tag, encode = _ENCODERS[type(value)]
    payload = encode(value)
    return tag + len(payload).to_bytes(_LENGTH, "big") + payload


def _unframe(data: bytes, depth: int) -> Iterator[Any]:
    """Yield the values framed one after the other in `data`; tuples nest up to `depth`."""
    at = 0
    while at < len(data):
        start = at + 1 + _LENGTH
        end = start + int.from_bytes(data[at + 1 : start], "big")
        if not start <= end <= len(data) or depth == 0:
            raise ValueError("cut off, or nested too deep")
        tag, payload = data[at : at + 1], data[start:end]
        yield tuple(_unframe(payload, depth - 1)) if tag == b"t" else _DECODERS[tag](payload)
        at = end


_LENGTH = 8  # bytes
_DEPTH = 64  # of tuples in fields that are read back
_ENCODERS: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    type(None): (b"n", lambda _: b""),
    bool: (b"b", lambda v: b"1" if v else b"0"),
    int: (b"i", lambda v: f"{v:x}".encode()),
    float: (b"f", lambda v: v.hex().encode()),  # tells 0.0 from -0.0; every nan is one value
    str: (b"s", lambda v: v.encode("utf-8", "surrogatepass")),
    bytes: (b"y", bytes),
    tuple: (b"t", lambda v: b"".join(map(_frame, v))),
}
_DECODERS: dict[bytes, Callable[[bytes], Any]] = {
    b"n": lambda _: None,
    b"b": lambda data: data == b"1",
    b"i": lambda data: int(data, 16),
    b"f": lambda data: float.fromhex(data.decode("ascii")),
    b"s": lambda data: data.decode("utf-8", "surrogatepass"),
    b"y": bytes,
}
