"""CPU weights whose released storage leaves shape, strides and identity as they were.

Dynamo's guards therefore still hold. Any access to the data, by torch's ops, `copy_` and
`torch.save` too, raises a `RuntimeError` of `WORDS`. `p.data = ...`, `load_state_dict(...,
assign=True)` and `swap_tensors` give a weight data again.
"""

import ctypes
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ipex_inductor import compat
from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.compat import private_memory
from ipex_inductor.templates.build.cpp import NotBuiltError, load, require_found

TODO = "Load it again (load_state_dict(..., assign=True)) or leave out option drop_plain_weights."
WORDS = (
    "expected a weight with data; got one that is packed for a compiled graph and whose plain data "
    f"is freed. {TODO}"
)
_freed: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the storage's address


def any_is() -> bool:
    """Return whether this process has a weight with released storage."""
    return bool(_freed)


def is_freed(weight: torch.Tensor) -> bool:
    """Return whether the storage of a weight is released."""
    return bool(_freed) and compat.open_storage(weight)._cdata in _freed


def address(weight: torch.Tensor) -> int:
    """Return the address of a weight's data; if released, a number unique to its storage."""
    return -compat.open_storage(weight)._cdata if is_freed(weight) else weight.data_ptr()


def free(weights: Sequence[torch.Tensor]) -> str:
    """Release the storage of all weights, or of none; return "" or the reason.

    No op of another thread may read the weights meanwhile.
    """
    # Kept alive, as references to them are counted.
    storages = [compat.open_storage(weight) for weight in weights]
    try:
        if not all(map(_is_alone, weights)):
            return "another tensor has a part of them, or they are not the CPU's own"
        for weight, storage in zip(weights, storages, strict=True):
            key = storage._cdata
            _library().free_data(id(weight), _place(), WORDS.encode())
            _freed[key] = weakref.ref(storage, functools.partial(_freed.pop, key))
    except NotBuiltError as error:
        return str(error)
    return ""


def _is_alone(weight: torch.Tensor) -> bool:
    """Return whether a weight is a plain CPU tensor that alone owns all of its storage."""
    whole = (
        compat.open_storage(weight).nbytes() == weight.nbytes > 0 and weight.device.type == "cpu"
    )
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and not is_freed(weight)
    return whole and plain and _holders(weight) == _holders_of_one()


def _holders(weight: torch.Tensor) -> int:
    held = compat.open_storage(weight)  # its Python object may count as a reference
    count: int = _library().holders(id(weight), _place())
    del held
    return count


@functools.cache
def _holders_of_one() -> int:
    """Return the number of references to a storage that a single tensor owns."""
    return _holders(torch.nn.Parameter(torch.zeros(8, device="cpu")))


def _place() -> int:
    """Return the byte offset of the TensorImpl's address in a weight's Python object."""
    return require_found(private_memory.layout()).impl


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library of freed.cpp. Raises `NotBuiltError`."""
    source = Path(__file__).with_name("freed.cpp").read_text
    library = load(source, pairs({"template": "freed weights"}), with_torch=True)
    address, place = ctypes.c_void_p, ctypes.c_int64
    library.holders.argtypes, library.holders.restype = [address, place], ctypes.c_int64
    library.free_data.argtypes = [address, place, ctypes.c_char_p]
    library.free_data.restype = None
    return library
