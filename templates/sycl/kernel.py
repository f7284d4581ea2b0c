"""The common head of all SYCL kernel sources, and the kernels' names of torch's dtypes."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ipex_inductor.templates.sycl.tiles import CPU

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
}
HEAD = ("lean.cpp", "language.cpp")
NATIVE_BF16 = "-DNATIVE_BF16"  # Intel's GPUs round by an instruction, which the CPU's driver lacks


@functools.cache
def part(name: str) -> str:
    """Return the text of a file in this folder."""
    return Path(__file__).with_name(name).read_text("utf-8")


def prevent_unrolling(text: str) -> str:
    """Return `text` with no loop unrolled, neither by its own pragmas nor by a driver."""
    text = re.sub(r"^ *#pragma (?:no)?unroll\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^ *for \(", r"#pragma nounroll\n\g<0>", text, flags=re.MULTILINE)


def head() -> str:
    """Return the common head of all kernel sources."""
    return "".join(map(part, HEAD))


def constants(values: Mapping[str, int]) -> str:
    """Return C++ definitions of integer constants."""
    return "".join(f"constexpr int {name} = {int(value)};\n" for name, value in values.items())


def types(names: Mapping[str, str]) -> str:
    """Return C++ definitions of type names."""
    return "".join(f"using {name} = {value};\n" for name, value in names.items())


def options(arch: str) -> tuple[str, ...]:
    """Return the options of the compiler to SPIR-V for an architecture."""
    return () if arch == CPU else (NATIVE_BF16,)
