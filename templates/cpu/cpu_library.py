"""C++ kernels for CPUs: GEMMs on weights in blocks, short attention, convolutions.

One library that Python and Inductor's C++ call, or part of a package's code.
"""

from pathlib import Path

import torch

from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu.kernel_library import KernelLibrary

PARTS = (
    "vectors.cpp",
    "blocked.cpp",
    "attention_parts.cpp",
    "short_attention.cpp",
    "decode_attention.cpp",
    "winograd.cpp",
)
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
DECODE = """
IPEX_KERNEL(decode_{dtype}, (const int64_t*, float, const void*, const void*, const void*,
                             const void*, const void*, void*))
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


def is_paired() -> bool:
    """Return whether the target CPU multiplies pairs of bf16."""
    return architecture() in PAIRED


def has_tiles() -> bool:
    """Return whether the target CPU has AMX."""
    return architecture() == "x86-64:amx"


def source(beside_torch: bool = False, parts: tuple[str, ...] = PARTS, more: str = "") -> str:
    """Return the C++ for the target CPU.

    Args:
        beside_torch: whether it is part of code with torch's headers.
        parts: names of the files.
        more: text behind them.
    """
    settings = {
        "BF16_PRODUCTS": is_paired(),
        "AMX_TILES": has_tiles(),
        "BESIDE_TORCH": beside_torch,
    }
    defined = (f"#define {name} {value:d}" for name, value in settings.items())
    texts = (Path(__file__).with_name(name).read_text() for name in parts)
    return "\n".join(["#ifndef BF16_PRODUCTS", *defined, *texts, more, END])


def declarations(inside: bool) -> str:
    """Return the kernels' declarations in C++, and a function that returns a tensor's address.

    `inside`: for code that contains their `source`; else they declare functions of `library`.
    """
    macro = INSIDE if inside else Path(__file__).with_name("in_python.cpp").read_text()
    functions = [(PRODUCT + DECODE).format(dtype=dtype) for dtype in PRODUCTS.values()]
    functions += [DECLARED.format(dtype=dtype) for dtype in NAMES.values()]
    guard = "#ifndef IPEX_KERNELS", "#define IPEX_KERNELS"
    return "\n".join((*guard, ADDRESS, macro, *functions, "#endif", ""))


def _variants() -> list[dict[str, int]]:
    return [{"bf16 products": is_paired(), "tiles": has_tiles()}]


# Attention uses oneDNN's micro-kernel if this torch has it, else our own.
LIBRARY = KernelLibrary("cpu", lambda settings: source(), _variants)
library, why_not, begin = LIBRARY.library, LIBRARY.why_not, LIBRARY.begin
why_not_in_cpp, ship_library, address = LIBRARY.why_not_in_cpp, LIBRARY.ship, LIBRARY.address
