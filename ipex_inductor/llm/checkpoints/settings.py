"""Settings of quantized checkpoints: method, bits, groups, out of their JSON files."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ipex_inductor.errors import CheckpointError
from ipex_inductor.llm.checkpoints.tensors import read_json
from ipex_inductor.ops.quant.weight_only import NIBBLES, STORED

FILES = ("quant_config.json", "quantize_config.json")
# Names of GPTQ's `checkpoint_format`, and their layouts.
GPTQ_FORMATS = {"": "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}
# Parts of auto-round's `packing_format`, or of `backend` in older files: "auto_round:auto_gptq".
AUTO_ROUND_FORMATS = {
    "auto_gptq": "gptq",
    "gptq": "gptq",
    "gptq_v2": "gptq_v2",
    "auto_awq": "awq",
    "awq": "awq",
}
COMPRESSED_FORMATS = {
    "pack-quantized": "packed",
    "int-quantized": "compressed_int8",
    "naive-quantized": "compressed_int8",
}
BITS = (4, 8)


@dataclass(frozen=True)
class CheckpointSettings:
    """Storage format of the weights of a checkpoint.

    `layout` is a key of `layouts.LAYOUTS`. `group_size` -1 is the whole row. With `mixed` layers
    may have other bits and groups, which their shapes tell. `block` are rows and columns of FP8
    blocks. `weight_dtype` is that of layout "ipex", whose tensors are those of its layers.
    """

    layout: str
    bits: int = 4
    group_size: int = -1
    desc_act: bool = False
    sym: bool = False
    mixed: bool = False
    block: tuple[int, int] = (1, 1)
    weight_dtype: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)


def find_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the description of the quantization in a folder, with `quant_method`.

    It is `quantization_config` in config.json, else quant_config.json (AWQ), else
    quantize_config.json (GPTQ).

    Raises:
        CheckpointError: if there is none.
    """
    place = Path(folder)
    place = place.parent if place.is_file() else place
    config = place / "config.json"
    if config.is_file():
        raw = read_json(config).get("quantization_config")
        if isinstance(raw, dict):
            return raw
    for name, method in zip(FILES, ("awq", "gptq"), strict=True):
        if (place / name).is_file():
            return {"quant_method": method, **read_json(place / name)}
    raise CheckpointError(
        "quantization_config in config.json, quant_config.json or quantize_config.json",
        f"none of them in {str(place)!r}",
        "Pass the folder of a quantized checkpoint, or (state_dict, quant_config).",
    )


def read_model_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the model's config in a folder.

    Raises:
        CheckpointError: if there is none.
    """
    place = Path(folder)
    file = (place.parent if place.is_file() else place) / "config.json"
    if not file.is_file():
        advice = "Ranks are cut by the heads that it says: copy it beside the tensors."
        raise CheckpointError("config.json beside the tensors", f"no {file}", advice)
    return read_json(file)


def read_settings(raw: Mapping[str, Any]) -> CheckpointSettings:
    """Return the settings of a description.

    Raises:
        CheckpointError: for a method, a format or bits that no reader serves.
    """
    method = str(raw.get("quant_method", "")).lower().replace("_", "-")
    if method not in METHODS:
        _refuse("quant_method", method, METHODS)
    settings = METHODS[method](raw)
    if settings.bits not in BITS:
        advice = "Quantize the model to 4 or 8 bits."
        raise CheckpointError("weights of 4 or 8 bits", f"{settings.bits} bits", advice)
    size = settings.group_size
    if size != -1 and size <= 0:
        raise CheckpointError("group_size -1 or positive", str(size), "Repair the JSON file.")
    return settings


def _refuse(key: str, value: str, table: Mapping[str, Any]) -> None:
    names = ", ".join(name for name in table if name)
    advice = "Save the checkpoint in one of these."
    raise CheckpointError(f"{key} out of {names}", repr(value), advice)


def _integers(raw: Mapping[str, Any], layout: str) -> CheckpointSettings:
    """Return settings of GPTQ's and AWQ's keys.

    Raises:
        CheckpointError: for values that are no numbers.
    """
    try:
        return CheckpointSettings(
            layout=layout,
            bits=int(raw.get("bits", raw.get("w_bit", raw.get("wbits", 4)))),
            group_size=int(raw.get("group_size", raw.get("q_group_size", -1)) or -1),
            desc_act=bool(raw.get("desc_act", False)),
            sym=bool(raw.get("sym", not raw.get("zero_point", True))),
            mixed=bool(raw.get("dynamic") or raw.get("extra_config")),
            raw=raw,
        )
    except (TypeError, ValueError) as error:
        came = f"something else ({error})"
        raise CheckpointError("numbers as bits and group_size", came, "Repair it.") from error


def _gptq(raw: Mapping[str, Any]) -> CheckpointSettings:
    name = str(raw.get("checkpoint_format") or "")
    if name not in GPTQ_FORMATS:
        _refuse("checkpoint_format", name, GPTQ_FORMATS)
    return _integers(raw, GPTQ_FORMATS[name])


def _awq(raw: Mapping[str, Any]) -> CheckpointSettings:
    version = str(raw.get("version") or "gemm").lower()
    if version != "gemm":
        _refuse("version", version, {"gemm": None})
    return _integers(raw, "awq")


def _auto_round(raw: Mapping[str, Any]) -> CheckpointSettings:
    name = str(raw.get("packing_format") or raw.get("backend") or "")
    layouts = [AUTO_ROUND_FORMATS[part] for part in name.split(":") if part in AUTO_ROUND_FORMATS]
    if name and not layouts:
        _refuse("packing_format", name, AUTO_ROUND_FORMATS)
    return _integers(raw, layouts[0] if name else "gptq")


def _rtn(raw: Mapping[str, Any]) -> CheckpointSettings:
    return _integers(raw, "gptq")


def _int8(raw: Mapping[str, Any]) -> CheckpointSettings:
    return CheckpointSettings("int8", 8, -1, sym=True, raw=raw)


def _fp8(raw: Mapping[str, Any]) -> CheckpointSettings:
    block = raw.get("weight_block_size") or (128, 128)
    rows, columns = (int(size) for size in block)
    return CheckpointSettings("fp8", 8, columns, sym=True, block=(rows, columns), raw=raw)


def _read_compressed_tensors(raw: Mapping[str, Any]) -> CheckpointSettings:
    """Return settings of compressed-tensors, whose groups of layers must agree.

    Raises:
        CheckpointError: for several kinds of layers, or weights that are no integers.
    """
    groups = [*(raw.get("config_groups") or {}).values()]
    name = str(raw.get("format") or "")
    weights = [group.get("weights") or {} for group in groups]
    if not weights or any(w != weights[0] for w in weights):
        came = f"{len(weights)} different ones"
        raise CheckpointError("one kind of weights in config_groups", came, "Quantize so.")
    kind = str(groups[0].get("format") or name)
    if kind not in COMPRESSED_FORMATS:
        _refuse("format", kind, COMPRESSED_FORMATS)
    first = weights[0]
    if str(first.get("type", "int")) != "int":
        raise CheckpointError("weights of type int", str(first["type"]), "Quantize so.")
    return CheckpointSettings(
        layout=COMPRESSED_FORMATS[kind],
        bits=int(first.get("num_bits", 4)),
        group_size=int(first.get("group_size") or -1),
        desc_act=first.get("actorder") in ("group", True),
        sym=bool(first.get("symmetric", True)),
        raw=raw,
    )


def _native(raw: Mapping[str, Any]) -> CheckpointSettings:
    """Return settings of `save_native`.

    Raises:
        CheckpointError: for a type that does not exist.
    """
    weight_dtype = str(raw.get("weight_dtype", ""))
    if weight_dtype not in STORED:
        _refuse("weight_dtype", weight_dtype, STORED)
    settings = _integers({**raw, "bits": 4 if weight_dtype in NIBBLES else 8}, "ipex")
    return replace(settings, weight_dtype=weight_dtype)


METHODS: dict[str, Callable[[Mapping[str, Any]], CheckpointSettings]] = {
    "gptq": _gptq,
    "awq": _awq,
    "rtn": _rtn,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "int8": _int8,
    "fp8": _fp8,
    "compressed-tensors": _read_compressed_tensors,
    "ipex": _native,
}
