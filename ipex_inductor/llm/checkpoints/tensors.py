"""Tensors of a checkpoint by their names, read when they are used."""

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.errors import CheckpointError
from ipex_inductor.quantization.files.tensor_file import DTYPES

ALL_DTYPES = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
AGAIN = "Copy the checkpoint again, or download it anew."
INDEX = "*.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class TensorEntry:
    """Shape and dtype of a tensor, and a function that returns it.

    `load` returns memory of its own for files, so that it is released after use. `map` returns a
    view of the file, of which pages are read when they are used.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    map: Callable[[], Tensor]


def open_tensors(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Return the tensors of a file or of all files of a folder.

    Safetensors come first; files of `torch.save` count if there are none.

    Raises:
        CheckpointError: for a missing, torn or foreign file, and a name in two files.
    """
    place = Path(path)
    files = [place] if place.is_file() else list_files(place)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        is_safe = file.suffix == ".safetensors"
        content = read_header(file) if is_safe else open_pickled(file)
        if twice := sorted(entries.keys() & content.keys()):
            came = f"{twice[0]} in two"
            raise CheckpointError(f"names in one file of {str(path)!r}", came, AGAIN)
        entries.update(content)
    return entries


def list_files(folder: Path) -> list[Path]:
    """Return the files of tensors in a folder: those of its index, else all.

    Raises:
        CheckpointError: if there are none, or one of the index is missing.
    """
    if not folder.is_dir():
        advice = "Pass the folder with config.json and the files of tensors."
        raise CheckpointError("a folder of a checkpoint", f"no folder {str(folder)!r}", advice)
    for index in folder.glob(INDEX):
        names = sorted({*read_json(index).get("weight_map", {}).values()})
        files = [folder / name for name in names]
        if absent := [file.name for file in files if not file.is_file()]:
            came = f"{folder} without {', '.join(absent)}"
            raise CheckpointError(f"all files that {index.name} lists", came, AGAIN)
        if files:
            return files
    for pattern in ("*.safetensors", *PICKLED):
        if files := sorted(folder.glob(pattern)):
            return files
    raise CheckpointError(
        "files of tensors: .safetensors, .bin, .pt or .pth",
        f"none in {str(folder)!r}",
        "Pass the folder of a checkpoint.",
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        CheckpointError: if it holds none.
    """
    try:
        content = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"a JSON file {file}", f"a torn one ({error})", AGAIN) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"a JSON object in {file}", type(content).__name__, AGAIN)
    return content


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file; its size and all offsets are checked.

    Raises:
        CheckpointError: for a torn or foreign file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= size - 8 else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        rows = {name: _read_row(row) for name, row in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        came = f"{file}, torn or foreign ({type(error).__name__}: {error})"
        raise CheckpointError("a safetensors file", came, AGAIN) from error
    start = 8 + length
    end = max((last for *_, last in rows.values()), default=0)
    if start + end > size:
        expected = f"{start + end} bytes in {file}, by its header"
        raise CheckpointError(expected, f"{size}: it is torn", AGAIN)
    return {name: _entry(file, start, *row) for name, row in rows.items()}


def _read_row(row: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return dtype, shape, first and last byte of a header's row.

    Raises:
        ValueError: if they do not go together.
        KeyError: for a dtype or a key that is missing.
    """
    dtype, shape = ALL_DTYPES[row["dtype"]], tuple(int(size) for size in row["shape"])
    first, last = (int(offset) for offset in row["data_offsets"])
    count = dtype.itemsize
    for size in shape:
        count *= size
    if first < 0 or min(shape, default=0) < 0 or last - first != count:
        raise ValueError(f"{last - first} bytes for {list(shape)} in {row['dtype']}")
    return dtype, shape, first, last


def _entry(
    file: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...], first: int, last: int
) -> TensorEntry:
    """Return the entry of a tensor in a safetensors file.

    Args:
        file: the file.
        start: place of the first tensor.
        dtype: of the tensor.
        shape: of the tensor.
        first: its first byte behind `start`.
        last: the byte behind its last one.
    """

    def load() -> Tensor:
        octets = torch.empty(last - first, dtype=torch.uint8)
        if last > first:
            view: Any = octets.numpy()
            with file.open("rb", buffering=0) as stream:
                stream.seek(start + first)
                _fill(stream, memoryview(view), file)
        return octets.view(dtype).view(shape)

    def view_file() -> Tensor:
        if last == first:
            return torch.empty(shape, dtype=dtype)
        page = (start + first) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with file.open("rb") as stream:
            length = start + last - page
            data = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
        octets = torch.frombuffer(data, dtype=torch.uint8, offset=start + first - page)
        if (start + first) % dtype.itemsize:
            octets = octets.clone()  # files of other writers may not be aligned
        return octets.view(dtype).view(shape)

    return TensorEntry(shape, dtype, load, view_file)


def _fill(stream: Any, view: memoryview, file: Path) -> None:
    """Read a view full: one read returns at most 2 GiB.

    Raises:
        CheckpointError: if the file became shorter.
    """
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise CheckpointError(f"all bytes of {file}", "fewer: it changed", AGAIN)
        done += count


def open_pickled(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file of `torch.save`; only tensors are unpickled.

    Raises:
        CheckpointError: for a torn or foreign file.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds
        came = f"{file}, torn or foreign ({type(error).__name__}: {error})"
        raise CheckpointError("a state_dict of torch.save", came, AGAIN) from error
    return open_state(state)


def open_state(state: Any) -> dict[str, TensorEntry]:
    """Return the tensors of a state_dict.

    Raises:
        CheckpointError: if it is none.
    """
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        advice = "Pass a mapping of names to tensors."
        raise CheckpointError("a state_dict", f"a {type(state).__name__}", advice)
    return {name: _keep(tensor) for name, tensor in state.items()}


def _keep(tensor: Tensor) -> TensorEntry:
    """Return the entry of a tensor of the caller, which is copied where a model keeps it."""
    detached = tensor.detach()
    return TensorEntry(tuple(tensor.shape), tensor.dtype, detached.clone, lambda: detached)
