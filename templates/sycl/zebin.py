"""The `.ze_info` of native code for Intel GPUs, and the limits that it must keep.

The file is ELF; the section is YAML of a fixed form, from which a few plain fields are read.
"""

import re
import struct
from dataclasses import dataclass

from ipex_inductor.target.device import Target

_HEADER, _SECTION = "<QIHHHHHH", "<IIQQQQIIQQ"  # from e_shoff on; a section's header
_NONE = "Intel_Symbol_Table_Void_Program"  # the name of the entry for everything outside of kernels
MOST_REGISTERS = 256


@dataclass(frozen=True)
class Facts:
    """Facts of a kernel: sizes in bytes, except the lanes and the registers of a thread.

    `engine`: whether the code uses the matrix engine; `stack_calls`: whether it calls by a stack.
    """

    kernel: str
    lanes: int
    registers: int
    local: int
    spilled: int
    private: int
    engine: bool
    stack_calls: bool

    def wrong(self, target: Target, engine: bool) -> str:
        """Return why the kernel is not fit for `target`, or "".

        `engine`: whether it is required to use the matrix engine.
        """
        rules = {
            f"spills {self.spilled} bytes": self.spilled > 0,
            f"has {self.private} bytes of private memory": self.private > 0,
            "calls by a stack": self.stack_calls,
            "uses no matrix engine": engine and not self.engine,
            f"needs {self.registers} registers": self.registers > MOST_REGISTERS,
            f"needs {self.local} bytes of local memory": self.local > (target.shared_memory or 0),
        }
        return "; ".join(reason for reason, is_broken in rules.items() if is_broken)


def facts(code: bytes) -> tuple[Facts, ...]:
    """Return the facts of each kernel in native code. Raises `ValueError` for another file."""
    info = _sections(code).get(".ze_info")
    if info is None:
        raise ValueError("no native code for Intel's GPUs: no section .ze_info")
    return tuple(_facts(kernel) for kernel in _kernels(info.decode()))


def _kernels(info: str) -> list[str]:
    listed = re.split(r"\n(?=\S)", info.partition("\nkernels:")[2])[0]
    blocks = re.split(r"^  - name: +", listed, flags=re.MULTILINE)[1:]
    return [block for block in blocks if not block.startswith(_NONE)]


def _facts(kernel: str) -> Facts:
    header = kernel.partition("payload_arguments:")[0]
    fields = dict(re.findall(r"^ {6}(\w+): +(\S+)$", header, re.MULTILINE))

    def number(name: str) -> int:
        return int(fields.get(name, 0))

    return Facts(
        kernel.split(maxsplit=1)[0],
        number("simd_size"),
        number("grf_count"),
        number("slm_size"),
        number("spill_size"),
        number("private_size"),
        fields.get("has_dpas") == "true",
        fields.get("has_stack_calls") == "true",
    )


def _sections(code: bytes) -> dict[str, bytes]:
    if code[:4] != b"\x7fELF":
        raise ValueError("no native code for Intel's GPUs: not an ELF file")
    start, _, _, _, _, size, count, names = struct.unpack_from(_HEADER, code, 0x28)
    rows = [struct.unpack_from(_SECTION, code, start + n * size) for n in range(count)]
    text = rows[names][4]

    def name(offset: int) -> str:
        return code[text + offset : code.index(b"\0", text + offset)].decode()

    return {name(row[0]): code[row[4] : row[4] + row[5]] for row in rows}
