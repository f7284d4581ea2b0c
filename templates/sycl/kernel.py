"""What every kernel text of ours begins with, and torch's dtypes in the kernels' words."""

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
    """A file of this folder."""
    return Path(__file__).with_name(name).read_text("utf-8")


def rolled(text: str) -> str:
    """`text` with no loop written out, neither by its own word nor by a driver."""
    text = re.sub(r"^ *#pragma (?:no)?unroll\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^ *for \(", r"#pragma nounroll\n\g<0>", text, flags=re.MULTILINE)


def head() -> str:
    """What they begin with."""
    return "".join(map(part, HEAD))


def constants(values: Mapping[str, int]) -> str:
    """Their definitions."""
    return "".join(f"constexpr int {name} = {int(value)};\n" for name, value in values.items())


def types(names: Mapping[str, str]) -> str:
    """Definitions of types."""
    return "".join(f"using {name} = {value};\n" for name, value in names.items())


def options(arch: str) -> tuple[str, ...]:
    """Those of the compiler to SPIR-V."""
    return () if arch == CPU else (NATIVE_BF16,)
