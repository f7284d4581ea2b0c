"""C++ kernels for CPUs: GEMMs on weights in blocks, short attention, convolutions.

One library that Python and Inductor's C++ call, or part of a package's code.
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
# The signatures by which generated C++ calls the kernels of each dtype.
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
    """Return the library, built at the first call and stored in the kernel cache.

    Raises `NotBuiltError`. Attention uses oneDNN's micro-kernel if this torch has it, else our own.
    """
    return load(source, _problem(), with_torch=True)


def ship_library() -> None:
    """Store the library in the cache for others with the target CPU, as `cpp.ship` does."""
    ship(source, _problem(), with_torch=True)


def _problem() -> Pairs:
    return pairs({"template": "cpu kernels", "bf16 products": is_paired()})


@functools.cache
def begin() -> None:
    """Start to build the library in another thread; others wait for its entry in the cache."""
    threading.Thread(target=why_not, name="ipex cpu kernels", daemon=True).start()


@functools.cache
def why_not() -> str | None:
    """Return why there is no library here, None if there is."""
    try:
        library()
    except NotBuiltError as error:
        return str(error)
    return None


def why_not_in_cpp() -> str | None:
    """Return why the compiler does not accept the kernels for the target CPU, None if it does.

    It must be GCC, and support that CPU's bf16.
    """
    return _why_not_taken(architecture())


@functools.cache
def _why_not_taken(arch: str) -> str | None:
    return why_not_taken(source(), arch)


def is_paired() -> bool:
    """Return whether the target CPU multiplies pairs of bf16."""
    return architecture() in PAIRED


def source(beside_torch: bool = False, parts: tuple[str, ...] = PARTS, more: str = "") -> str:
    """Return the C++ for the target CPU.

    Args:
        beside_torch: whether it is part of code with torch's headers.
        parts: names of the files.
        more: text behind them.
    """
    settings = {"BF16_PRODUCTS": is_paired(), "BESIDE_TORCH": beside_torch}
    defined = (f"#define {name} {value:d}" for name, value in settings.items())
    texts = (Path(__file__).with_name(name).read_text() for name in parts)
    return "\n".join(["#ifndef BF16_PRODUCTS", *defined, *texts, more, END])


def declarations(inside: bool) -> str:
    """Return the kernels' declarations in C++, and a function that returns a tensor's address.

    `inside`: for code that contains their `source`; else they declare functions of `library`.
    """
    macro = INSIDE if inside else Path(__file__).with_name("in_python.cpp").read_text()
    functions = [PRODUCT.format(dtype=dtype) for dtype in PRODUCTS.values()]
    functions += [DECLARED.format(dtype=dtype) for dtype in NAMES.values()]
    guard = "#ifndef IPEX_KERNELS", "#define IPEX_KERNELS"
    return "\n".join((*guard, ADDRESS, macro, *functions, "#endif", ""))


def address(name: str) -> int:
    """Return the address of a function of the library, for C++. Raises `NotBuiltError`."""
    function_address = ctypes.cast(library()[name], ctypes.c_void_p).value
    assert function_address is not None
    return function_address
