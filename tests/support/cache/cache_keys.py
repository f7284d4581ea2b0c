"""Keys and entries for the tests of the kernel cache."""

import hashlib

from ipex_inductor.aot_cache.key import Key

KEY = Key(
    kind="cubin",
    source="0" * 64,
    tables=(("matmul.py.jinja", "a1"), ("epilogue", "b2")),
    options=(("warps", 1), ("stages", 3)),
    problem=(("dtype", "bf16"), ("shape", (64, 32)), ("layout", (32, 1))),
    architecture="sm_90:NVIDIA-H100",
    toolkit=(("ptxas", "12.8"), ("flags", "-O3")),
    triton="3.6.0",
    torch="2.13.0+cu130",
    environment=(("CXX", "g++"),),
)


def key(number=None):
    """The key of kernel `number`."""
    if number is None:
        return KEY
    return Key(**KEY.fields | {"problem": (("number", number),)})


def blob(number, size=1024):
    """The kernel's code: no two have a byte string in common, and it shows whose it is."""
    return hashlib.shake_256(b"%d" % number).digest(size)
