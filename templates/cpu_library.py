"""Our kernels for CPUs in C++, one library: products on weights in blocks, short attention."""

import ctypes
import functools
import threading
from pathlib import Path

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.target import current
from ipex_inductor.templates.cpp import NotBuiltError, load

PARTS = ("vectors.cpp", "blocked.cpp", "short_attention.cpp")
PAIRED = ("x86-64:avx512_bf16", "x86-64:amx")  # CPUs that multiply pairs of bf16


@functools.cache
def library() -> ctypes.CDLL:
    """The library, built at the first call and kept in the kernel cache. Raises `NotBuiltError`.

    Products of many rows use oneDNN's micro-kernel where torch has it here, else ours.
    """
    paired = current().arch in PAIRED
    problem = pairs({"template": "cpu kernels", "bf16 products": paired})
    loaded = load(functools.partial(_source, paired), problem, with_torch=True)
    loaded.ready()
    return loaded


@functools.cache
def begin() -> None:
    """Have it built in another thread; who wants it meanwhile waits for that one's entry."""
    threading.Thread(target=why_not, name="ipex cpu kernels", daemon=True).start()


@functools.cache
def why_not() -> str | None:
    """Why there is no library here, None when there is."""
    try:
        library()
    except NotBuiltError as error:
        return str(error)
    return None


def _source(paired: bool) -> str:
    parts = [Path(__file__).with_name(name).read_text() for name in PARTS]
    return "\n".join([f"#define BF16_PRODUCTS {int(paired)}", *parts])
