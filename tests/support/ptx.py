"""A small interpreter of PTX for the instructions by which `weight_only_ptx` decodes integers."""

import re
import struct

MASK = 0xFFFFFFFF


def to_float(bits, pair):
    """Return the float of 16 bits."""
    if pair == "f16x2":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def to_bits(value, pair):
    """Return the 16 bits of a float that has no others."""
    if pair == "f16x2":
        bits = struct.unpack("<H", struct.pack("<e", value))[0]
    else:
        bits = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    assert to_float(bits, pair) == value, "it is rounded"
    return bits


def permute(a, b, selector):
    """Return `prmt`: four of eight bytes, or their sign bits repeated."""
    source, result = (b << 32) | a, 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = source >> (8 * (nibble & 7)) & 0xFF
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * i)
    return result


def look_up(a, b, c, table):
    """Return `lop3`: a bit of the table for each three bits."""
    result = 0
    for i in range(32):
        index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1
        result |= (table >> index & 1) << i
    return result


def multiply_add(pair, a, b, c):
    """Return `fma` of two halves."""
    halves = [
        to_bits(
            to_float(a >> s & 0xFFFF, pair) * to_float(b >> s & 0xFFFF, pair)
            + to_float(c >> s & 0xFFFF, pair),
            pair,
        )
        for s in (0, 16)
    ]
    return halves[1] << 16 | halves[0]


OPS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "lop3.b32": look_up,
    "fma.rn.bf16x2": lambda *given: multiply_add("bf16x2", *given),
    "fma.rn.f16x2": lambda *given: multiply_add("f16x2", *given),
}


def run(lines, results, operands):
    """Return the registers `$0` to `$(results - 1)` after instructions.

    Args:
        lines: a scope in braces; each line ends with a semicolon.
        results: number of results.
        operands: values of the registers behind them.
    """
    registers = {f"${results + i}": value for i, value in enumerate(operands)}
    assert lines[0].startswith("{ .reg .b32 ")
    assert lines[-1] == "}"
    declared = set(re.findall(r"\w+", lines[0].removeprefix("{ .reg .b32 ")))
    for line in lines[1:-1]:
        name, *words = line.removesuffix(";").replace(",", " ").split()
        target, *given = words
        assert target.startswith("$") or target in declared, line
        values = [registers[w] if w in registers else int(w, 0) for w in given]
        registers[target] = OPS[name](*values) & MASK
    return [registers[f"${i}"] for i in range(results)]
