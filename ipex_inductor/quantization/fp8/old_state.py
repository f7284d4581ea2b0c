"""Scales in checkpoints of IPEX: one pickled entry for each layer, under `_extra_state`."""

import io
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import SummaryFileError
from ipex_inductor.ops.quant import fp8_states
from ipex_inductor.quantization.fp8.linear import FP8Linear
from ipex_inductor.quantization.fp8.state import FORWARD_TENSORS, ScalingState

SUFFIX = "_extra_state"
KINDS = {"forward_state": ("fwd", FORWARD_TENSORS), "gradient_state": ("bwd", 1)}


def read_old_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace the entries of IPEX in a state dict by those of this package.

    It is a hook that runs before `load_state_dict`. Layers without an entry, or with an empty one,
    keep their scales.

    Args:
        module: the prepared model.
        state_dict: what is loaded.
        prefix: of the names of the model.

    Raises:
        SummaryFileError: for an entry that IPEX did not write.
    """
    layers = {n: m for n, m in module.named_modules() if isinstance(m, FP8Linear)}
    where, state = next((n, m) for n, m in module.named_modules() if isinstance(m, ScalingState))
    entries: dict[int, dict[str, Tensor]] = {}
    is_old = False
    for name, layer in layers.items():
        key = f"{prefix}{name}.{SUFFIX}" if name else f"{prefix}{SUFFIX}"
        if key in state_dict:
            is_old = True
            entry = read_entry(key, state_dict.pop(key))
            if entry is not None:
                entries[layer._fp8[1]] = entry
    if not is_old:
        return
    for buffer, (suffix, tensors) in KINDS.items():
        columns = getattr(state, buffer).detach().clone()
        lengths = {len(entry[f"amax_history_{suffix}"]) for entry in entries.values()}
        if len(lengths) > 1:
            raise SummaryFileError(
                "histories of one length", str(sorted(lengths)), "Load layers by themselves."
            )
        for length in lengths:
            missing = columns.new_zeros(
                max(0, length - len(columns) + fp8_states.HISTORY), columns.shape[1]
            )
            columns = torch.cat([columns, missing])[: fp8_states.HISTORY + length]
        for layer_number, entry in entries.items():
            part = slice(layer_number * tensors, (layer_number + 1) * tensors)
            columns[fp8_states.SCALE, part] = entry[f"scale_{suffix}"][:tensors]
            columns[fp8_states.SCALE_INV, part] = entry[f"scale_inv_{suffix}"][:tensors]
            columns[fp8_states.HISTORY :, part] = entry[f"amax_history_{suffix}"][:, :tensors]
        state_dict[f"{prefix}{where}.{buffer}"] = columns


def read_entry(key: str, value: Any) -> dict[str, Tensor] | None:
    """Return the tensors of an entry by their names in IPEX, None if it has no state.

    Args:
        key: name of the entry.
        value: a pickled dictionary in a `BytesIO`, bytes, or a tensor of bytes.

    Raises:
        SummaryFileError: for anything else, and for pickled code, which is not run.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = value.cpu().numpy().tobytes()
    data = value.getvalue() if isinstance(value, io.BytesIO) else value
    names = [f"{n}_{s}" for n in ("scale", "scale_inv", "amax_history") for s in ("fwd", "bwd")]
    try:
        entry = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return None if entry is None else {name: entry[name].float() for name in names}
    except Exception as error:
        raise SummaryFileError(
            "an FP8 state that IPEX saved", f"{key}: {error}", "Remove the entry."
        ) from error
