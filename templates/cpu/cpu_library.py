"""Our kernels for CPUs in C++: products on weights in blocks, short attention,
convolutions.

One library that Python calls and C++ of Inductor's, or part of a package's code.
"""

import ctypes
import functools
import threading
from pathlib import Path

import torch

from ipex_inductor.aot_cache.key import Pairs, pairs
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.build.cpp import NotBuiltError, load, ship, why_not_taken

PARTS = ("vectors.cpp", "blocked.cpp", "short_attention.cpp", "winograd.cpp")
END = """
#undef SHORT
#if BF16_PRODUCTS
#pragma GCC pop_options  // of vectors.cpp
#endif
#endif"""
PAIRED = ("x86-64:avx512_bf16", "x86-64:amx")  # CPUs that multiply pairs of bf16
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
PRODUCTS = {**NAMES, torch.float16: "float16"}  # the last by CPUs that convert it
# How generated C++ calls them, of each dtype.
PRODUCT = """
IPEX_KERNEL(product_{dtype}, (int64_t, int64_t, int64_t, int64_t, const void*, const void*,
                              const void*, const void*, void*, int32_t, int32_t))
"""
DECLARED = """
IPEX_KERNEL(attention_{dtype}, (const int64_t*, float, const void*, const void*, const void*,
                                const void*, void*))
IPEX_KERNEL(winograd_{dtype}, (const int64_t*, const void*, const void*, const void*, const void*,
                               void*, int32_t))
"""
ADDRESS = """
inline void* ipex_address(AtenTensorHandle tensor) {
  void* address;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &address));
  return address;
}
"""
INSIDE = '#define IPEX_KERNEL(name, takes) extern "C" void name takes;'  # of the same code


@functools.cache
def library() -> ctypes.CDLL:
    """The library, built at the first call and kept in the kernel cache. Raises `NotBuiltError`.

    Attention uses oneDNN's micro-kernel where torch has it here, else ours.
    """
    return load(source, _problem(), with_torch=True)


def ship_library() -> None:
    """Have it in the cache for others that have the CPU that is described. As `cpp.ship`."""
    ship(source, _problem(), with_torch=True)


def _problem() -> Pairs:
    return pairs({"template": "cpu kernels", "bf16 products": is_paired()})


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


def why_not_in_cpp() -> str | None:
    """Why the compiler here does not take them for the CPU that is compiled for, None if it does.

    It must be GCC, and know that CPU's bf16.
    """
    return _why_not_taken(architecture())


@functools.cache
def _why_not_taken(arch: str) -> str | None:
    return why_not_taken(source(), arch)


def is_paired() -> bool:
    """Whether the CPU that is compiled for multiplies pairs of bf16."""
    return architecture() in PAIRED


def source(beside_torch: bool = False) -> str:
    """In C++, for that CPU; `beside_torch`: as part of code that has torch's headers."""
    settings = {"BF16_PRODUCTS": is_paired(), "BESIDE_TORCH": beside_torch}
    defined = (f"#define {name} {value:d}" for name, value in settings.items())
    parts = (Path(__file__).with_name(name).read_text() for name in PARTS)
    return "\n".join(["#ifndef BF16_PRODUCTS", *defined, *parts, END])


def declared(inside: bool) -> str:
    """Their declarations in C++, and what gives them a tensor's address.

    `inside`: code that has their `source` in it; else they are those of `library`.
    """
    how = INSIDE if inside else Path(__file__).with_name("in_python.cpp").read_text()
    functions = [PRODUCT.format(dtype=dtype) for dtype in PRODUCTS.values()]
    functions += [DECLARED.format(dtype=dtype) for dtype in NAMES.values()]
    guarded = "#ifndef IPEX_KERNELS", "#define IPEX_KERNELS", ADDRESS, how, *functions, "#endif", ""
    return "\n".join(guarded)


def address(name: str) -> int:
    """Where a function of the library lies, for C++ that calls it. Raises `NotBuiltError`."""
    found = ctypes.cast(library()[name], ctypes.c_void_p).value
    assert found is not None
    return found
