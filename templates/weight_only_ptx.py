"""PTX that decodes four bytes of a quantized weight: integers become floats exactly.

A bf16 of the bits 0x4300 + q is 128 + q for q of 7 bits, and an fp16 of 0x6400 + q is 1024 + q for
q of 10 bits. `prmt` sets these bits for two elements at once, and one fused multiply-add subtracts
128, or 1024, and the zero point.
"""

import struct

from ipex_inductor.ops.quant.weight_only import NF4, SYMMETRIC

# By dtype: the upper byte of a float whose lower bits are an integer, the value that it adds, and
# one and minus one as pairs.
MAGIC = {"bfloat16": 0x43, "float16": 0x64}
ADDED = {"bfloat16": 128, "float16": 1024}
ONE = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}
MINUS_ONE = {"bfloat16": 0xBF80BF80, "float16": 0xBC00BC00}
PAIR = {"bfloat16": "bf16x2", "float16": "f16x2"}


def instructions(weight_dtype: str, dtype: str, zeroed: bool) -> list[str]:
    """Return the PTX: results are pairs of even elements, then of odd ones; then come operands.

    Args:
        weight_dtype: "int4", "int8", "nf4" or "fp8".
        dtype: of the results.
        zeroed: whether the operand behind the bytes has the offset of each element, see
            `ops.quant.weight_only_rows.BASES`.
    """
    if weight_dtype == "fp8":
        return ["{ .reg .b16 a, b; .reg .b32 c; .reg .f32 e, f;", *_decode_fp8(dtype), "}"]
    decode = {"int4": _decode_int4, "int8": _decode_int8, "nf4": _decode_nf4}[weight_dtype]
    lines = decode(dtype, zeroed)
    names = sorted({word for line in lines for word in _registers(line)})
    return ["{ .reg .b32 " + ", ".join(names) + ";", *(f"{line};" for line in lines), "}"]


def _registers(line: str) -> list[str]:
    words = line.replace(",", " ").split()[1:]
    return [word for word in words if word[0].isalpha()]


def _spread(result: str, code: str, first: bool, dtype: str) -> str:
    """Return the instruction that makes a pair of floats of two bytes of a register."""
    magic = f"{MAGIC[dtype]:#04x}" + f"{MAGIC[dtype]:02x}" * 3
    return f"prmt.b32 {result}, {code}, {magic}, {'0x4140' if first else '0x4342'}"


def _add(result: str, pair: str, offset: str, dtype: str) -> str:
    return f"fma.rn.{PAIR[dtype]} {result}, {pair}, one, {offset}"


def _decode_int4(dtype: str, zeroed: bool) -> list[str]:
    zero = -(ADDED[dtype] + SYMMETRIC["int4"])
    lines = [f"mov.b32 one, {ONE[dtype]:#010x}"]
    lines += [] if zeroed else [f"mov.b32 shift, {_pair_bits(zero, dtype):#010x}"]
    lines += ["and.b32 low, $4, 0x0f0f0f0f", "shr.b32 high, $4, 4"]
    lines += ["and.b32 high, high, 0x0f0f0f0f"]
    for i, code in enumerate(("low", "low", "high", "high")):
        offset = f"${5 + i % 2}" if zeroed else "shift"
        lines += [_spread("pair", code, i % 2 == 0, dtype), _add(f"${i}", "pair", offset, dtype)]
    return lines


def _decode_int8(dtype: str, zeroed: bool) -> list[str]:
    lines = [f"mov.b32 one, {ONE[dtype]:#010x}"]
    if dtype == "float16":
        # A shift by 128 makes an int8 unsigned.
        zero = _pair_bits(-(ADDED[dtype] + 128), dtype)
        lines += [] if zeroed else [f"mov.b32 shift, {zero:#010x}"]
        lines += ["xor.b32 code, $2, 0x80808080"]
        for i in range(2):
            offset = f"${3 + i}" if zeroed else "shift"
            lines += [_spread("pair", "code", i == 0, dtype), _add(f"${i}", "pair", offset, dtype)]
        return lines
    # The sign bit beside 0x43 makes a bf16 of 256 in place of 128: subtracting it is the sign.
    lines += [f"mov.b32 minus, {MINUS_ONE[dtype]:#010x}"]
    lines += ["and.b32 code, $2, 0x7f7f7f7f", "and.b32 sign, $2, 0x80808080"]
    for i in range(2):
        lines += [_spread("pair", "code", i == 0, dtype), _spread("base", "sign", i == 0, dtype)]
        target = "pair" if zeroed else f"${i}"
        lines += [f"fma.rn.bf16x2 {target}, base, minus, pair"]
        lines += [_add(f"${i}", "pair", f"${3 + i}", dtype)] if zeroed else []
    return lines


def _decode_nf4(dtype: str, zeroed: bool) -> list[str]:
    """Return a look-up of both bytes of 16 levels: `prmt` selects among eight."""
    words = [_float_bits(level, dtype) for level in NF4]
    tables = {
        f"{name}{i}": sum((words[4 * i + j] >> shift & 0xFF) << 8 * j for j in range(4))
        for name, shift in (("lower", 0), ("upper", 8))
        for i in range(4)
    }
    lines = [f"mov.b32 {name}, {value:#010x}" for name, value in tables.items()]
    lines += ["mov.b32 none, 0", "mov.b32 all, 0x00000080"]
    for i in range(2):
        lines += ["mov.b32 code, $4" if i == 0 else "shr.b32 code, $4, 16"]
        # A selector of 12 repeats the sign bit of `all`, one of 0 is a byte of `none`.
        lines += ["and.b32 half, code, 0x8888", "shr.b32 mask, half, 1", "or.b32 mask, mask, half"]
        lines += ["prmt.b32 mask, none, all, mask", "and.b32 code, code, 0x7777"]
        for name in ("lower", "upper"):
            lines += [
                f"prmt.b32 first, {name}0, {name}1, code",
                f"prmt.b32 second, {name}2, {name}3, code",
                f"lop3.b32 {name}, second, first, mask, 0xe4",
            ]
        lines += [f"prmt.b32 ${i}, lower, upper, 0x6240"]
        lines += [f"prmt.b32 ${2 + i}, lower, upper, 0x7351"]
    return lines


def _decode_fp8(dtype: str) -> list[str]:
    """Return conversions of pairs to fp16, which has all numbers of E4M3; NaN stays NaN."""
    lines = []
    for i in range(2):
        lines += [f"mov.b32 {{a, b}}, $2; cvt.rn.f16x2.e4m3x2 c, {'ab'[i]};"]
        if dtype == "float16":
            lines += [f"mov.b32 ${i}, c;"]
        else:
            lines += ["mov.b32 {a, b}, c; cvt.f32.f16 e, a; cvt.f32.f16 f, b;"]
            lines += [f"cvt.rn.bf16x2.f32 ${i}, f, e;"]
    return lines


def _pair_bits(value: float, dtype: str) -> int:
    bits = _float_bits(value, dtype)
    return bits << 16 | bits


def _float_bits(value: float, dtype: str) -> int:
    """Return the 16 bits of a float, rounded to nearest."""
    if dtype == "float16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
