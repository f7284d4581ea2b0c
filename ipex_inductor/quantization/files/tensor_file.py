"""Tensors in a safetensors file: 8 bytes of length, a JSON header, the bytes of all tensors."""

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.errors import SummaryFileError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # of the first tensor, in bytes


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> str:
    """Write tensors one after the other; return the SHA-256 of the file.

    Raises:
        SummaryFileError: for a type that the format has not.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            advice = "Save this model by torch.save."
            raise SummaryFileError("tensors of common types", f"{tensor.dtype} of {name}", advice)
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    file = Path(path)
    partial_file = file.with_name(f".{file.name}.{os.getpid()}")
    digest = hashlib.sha256()
    with partial_file.open("wb") as stream:
        head = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
        for piece in chain(head, map(_bytes, tensors.values())):
            stream.write(piece)
            digest.update(piece)
    partial_file.replace(file)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    values: Any = flat.view(torch.uint8).numpy()
    return memoryview(values) if flat.numel() else memoryview(b"")


def read_tensors(path: str | os.PathLike[str], digest: str) -> dict[str, Tensor]:
    """Return the tensors of a file; pages of it are read when they are used.

    Raises:
        SummaryFileError: if the file is missing, or not the one of the digest.
    """
    file = Path(path)
    if not file.is_file():
        advice = "Both files belong together; move them together."
        raise SummaryFileError("a file of weights", f"no file {str(path)!r}", advice)
    with file.open("rb") as stream:
        found_digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if found_digest != digest:
            raise SummaryFileError(
                f"weights of digest {digest[:12]}",
                f"{str(path)!r} of {found_digest[:12]}, torn or changed",
                "Copy both files again, or save the model anew.",
            )
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {name: _tensor(data, start, entry) for name, entry in header.items()}


def _tensor(data: mmap.mmap, start: int, entry: Mapping[str, Any]) -> Tensor:
    first, last = entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    if first == last:
        return torch.empty(entry["shape"], dtype=dtype)
    count = (last - first) // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start + first)
    return flat.reshape(entry["shape"])
