"""Offsets of fields in torch's C++ objects, which Python could read only one tensor at a time.

No header states them: each is found from tensors whose values are known, and `LayoutError` is
raised unless exactly one place fits. A word is 8 bytes.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.compat.private_memory.accessors import WORD, open_storage, tensor_data

IMPL_WORDS = 24  # of a TensorImpl, at least
STORAGE_WORDS = 7  # of a StorageImpl, at least
INLINE = 5  # dimensions whose sizes and strides a TensorImpl holds itself
KINDS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)

GRADIENT = "_ZNK3c1010TensorImpl4gradEv"  # c10::TensorImpl::grad() const


class LayoutError(RuntimeError):
    """A field that does not lie where it is expected, or in more places than one."""


@dataclass(frozen=True)
class Layout:
    """Offsets of a tensor's fields in torch's memory; words count from the start of a TensorImpl.

    Attributes:
        impl: byte offset of the TensorImpl's address in a tensor's Python object.
        version: word that points to the version counter.
        count: byte offset of the number in a version counter.
        storage: word that points to the storage.
        offset: word with the storage offset, in elements.
        data: word of a storage with the address of its memory.
        deleter: word of a storage with the function that frees its memory.
        dtype: word with the dtype in its lower 16 bits.
        item_sizes: bytes of an element for each number of a dtype; 0: unknown.
        keys: word with the dispatch keys.
        negative: bit of a negated tensor in that word.
        dimensions: word with the number of dimensions; sizes and strides follow it.
        python_object: word with the tensor's Python object, 0 if it has none.
        undefined_gradient: address of the TensorImpl of a gradient that is not there.
    """

    impl: int
    version: int
    count: int
    storage: int
    offset: int
    data: int
    deleter: int
    dtype: int
    item_sizes: tuple[int, ...]
    keys: int
    negative: int
    dimensions: int
    python_object: int
    undefined_gradient: int


@torch.inference_mode(False)
def find_layout() -> Layout:
    """Return where this torch keeps the fields of a tensor. Raises `LayoutError`."""
    try:
        library = ctypes.CDLL(torch._C.__file__)  # it includes the libraries it is linked with
        python_object, gradient = find_python_object(library), find_undefined_gradient(library)
    except (AttributeError, OSError) as error:
        raise LayoutError(f"torch's C interface is not to be had: {error}") from error
    version, count = find_version()
    storage, offset, data = find_storage()
    keys, negative = find_negative_key()
    dtype = find_dtype()
    return Layout(
        impl=find_impl(),
        version=version,
        count=count,
        storage=storage,
        offset=offset,
        data=data,
        deleter=find_deleter(storage),
        dtype=dtype,
        item_sizes=list_item_sizes(dtype),
        keys=keys,
        negative=negative,
        dimensions=find_dimensions(),
        python_object=python_object,
        undefined_gradient=gradient,
    )


def find_impl() -> int:
    """Return the byte offset of the TensorImpl's address in a tensor's Python object.

    It is the address that `_cdata` returns more slowly.
    """
    tensors = [torch.empty(n, device="cpu") for n in range(4)]
    tensors += [nn.Parameter(tensor) for tensor in tensors]

    def stands(index: int) -> bool:
        values = (ctypes.c_void_p.from_address(id(t) + WORD * index).value for t in tensors)
        return all(value == t._cdata for value, t in zip(values, tensors, strict=True))

    word_count = vars(torch._C)["TensorBase"].__basicsize__ // WORD
    # The first two words are Python's own.
    offsets = [WORD * index for index in range(2, word_count) if stands(index)]
    if len(offsets) != 1:
        raise LayoutError("a tensor's object does not hold its TensorImpl where it did")
    return offsets[0]


def find_negative_key() -> tuple[int, int]:
    """Return the word of a TensorImpl with the dispatch keys, and its negation bit."""
    plain = [torch.empty((n + 1,) * n, device="cpu") for n in range(6)]
    negated = [torch._neg_view(tensor) for tensor in plain]
    matches = []
    for place in range(2, IMPL_WORDS):  # the first two: virtual functions, reference count
        plain_words, negated_words = (
            {_word(t, place) for t in group} for group in (plain, negated)
        )
        (bit, *more) = {before ^ after for before in plain_words for after in negated_words}
        if len(plain_words) == len(negated_words) == 1 and not more and bit.bit_count() == 1:
            matches += [(place, bit)] if negated_words.pop() & bit else []
    if len(matches) != 1:
        raise LayoutError("a TensorImpl does not hold its dispatch keys where it did")
    return matches[0]


def find_dtype() -> int:
    """Return the word of a TensorImpl that holds the dtype in its lower 16 bits."""
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int64)
    tensors = [[torch.empty(n, 3, dtype=d, device="cpu") for n in (2, 2, 5)] for d in kinds]

    def tells(index: int) -> bool:
        numbers = [{_word(t, index) & 0xFFFF for t in group} for group in tensors]
        is_one_a_dtype = all(len(values) == 1 for values in numbers)
        return is_one_a_dtype and len(set.union(*numbers)) == len(kinds)

    matches = [index for index in range(2, IMPL_WORDS) if tells(index)]
    if len(matches) != 1:
        raise LayoutError("a TensorImpl does not hold its dtype where it did")
    return matches[0]


def list_item_sizes(place: int) -> tuple[int, ...]:
    """Return the bytes of an element for each number of a dtype in that word; 0: unknown."""
    item_sizes = [0] * 256
    for kind in KINDS:
        tensor = torch.empty(0, dtype=kind, device="cpu")
        item_sizes[_word(tensor, place) & 0xFF] = tensor.element_size()
    return tuple(item_sizes)


def find_dimensions() -> int:
    """Return the word of a TensorImpl that holds the number of dimensions.

    Five sizes and then five strides follow it; for more dimensions, the address of both.
    """
    sizes = [(), (7,), (3, 5), (2, 3, 7), (5, 2, 4, 3), (3, 2, 5, 4, 7), (2, 3, 4, 5, 6, 7, 8)]
    tensors = [torch.empty(shape, device="cpu") for shape in sizes]
    tensors += [t.permute([*reversed(range(t.dim()))]) for t in tensors]

    def tells(tensor: Tensor, place: int) -> bool:
        count = tensor.dim()
        if _word(tensor, place) != count:
            return False
        begin, stride_offset = tensor._cdata + WORD * (place + 1), INLINE
        if count > INLINE:
            begin, stride_offset = _word(tensor, place + 1), count
        values = (ctypes.c_int64 * (stride_offset + count)).from_address(begin)
        return (*values[:count], *values[stride_offset:]) == (*tensor.shape, *tensor.stride())

    matches = []
    for place in range(2, IMPL_WORDS - 2 * INLINE):
        if all(tells(t, place) for t in tensors):  # the longest last: their words are an address
            matches.append(place)
    if len(matches) != 1:
        raise LayoutError("a TensorImpl does not hold its sizes where it did")
    return matches[0]


@torch.inference_mode(False)
def find_python_object(theirs: ctypes.CDLL) -> int:
    """Return the word of a TensorImpl that holds its Python object, 0 if it has none.

    Args:
        theirs: torch's C interface.
    """
    tensors = [torch.empty(n, device="cpu") for n in range(4)]
    tensors += [nn.Parameter(tensor) for tensor in tensors]
    matches = [n for n in range(2, IMPL_WORDS) if all(_word(t, n) == id(t) for t in tensors)]
    alone = ctypes.POINTER(ctypes.c_void_p)()
    kind = theirs.aoti_torch_dtype_float32(), theirs.aoti_torch_device_type_cpu(), 0
    theirs.aoti_torch_empty_strided(ctypes.c_int64(0), None, None, *kind, ctypes.byref(alone))
    if len(matches) == 1 and alone:
        place = alone[0] + WORD * matches[0]
        nothing = ctypes.c_void_p.from_address(place).value
        theirs.aoti_torch_delete_tensor_object(alone)
        if nothing is None:
            return matches[0]
    raise LayoutError("a TensorImpl does not tell its object where it did")


@torch.inference_mode(False)
def find_undefined_gradient(library: ctypes.CDLL) -> int:
    """Return the address of the TensorImpl of a missing gradient.

    Args:
        library: torch's C++ library.
    """
    function = ctypes.cast(getattr(library, GRADIENT), ctypes.c_void_p).value
    assert function is not None
    ask: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(function)
    plain, trained, empty = (torch.empty(n, device="cpu") for n in range(3))
    tensors = [plain, trained.requires_grad_(), nn.Parameter(empty)]
    grads = [torch.empty_like(tensor) for tensor in tensors[1:]]

    def read_gradients() -> list[int | None]:
        return [ctypes.c_void_p.from_address(ask(t._cdata)).value for t in tensors]

    before = read_gradients()
    for tensor, grad in zip(tensors[1:], grads, strict=True):
        tensor.grad = grad
    during = read_gradients()
    for tensor in tensors[1:]:
        tensor.grad = None
    undefined, defined = before[0], [grad._cdata for grad in grads]
    is_expected = {*before, *read_gradients()} == {undefined} and during == [undefined, *defined]
    if is_expected and undefined:
        return undefined
    raise LayoutError("a TensorImpl does not tell its gradient as it did")


@torch.inference_mode(False)
def find_version() -> tuple[int, int]:
    """Return the word of a TensorImpl that points to its version counter, and its byte offset."""
    bases = [torch.zeros(8, device="cpu") for _ in range(5)]
    for number, base in enumerate(bases):
        for _ in range(3 * number):
            base.add_(1)
    # The last tensor of a group has a counter of its own.
    groups = [(base, base.detach(), tensor_data.__get__(base)) for base in bases]

    def points(place: int) -> bool:
        addresses = [[_word(t, place) for t in group] for group in groups]
        return all(
            own_counter == shared not in (0, separate)
            for own_counter, shared, separate in addresses
        )

    matches = [place for place in range(2, IMPL_WORDS) if points(place)]
    if len(matches) != 1:
        raise LayoutError("a TensorImpl does not point to its version where it did")
    counters = [(_word(base, matches[0]), base._version) for base in bases]
    offsets = [n for n in range(WORD, 3 * WORD, 4) if all(_half(c + n) == v for c, v in counters)]
    if len(offsets) != 1:
        raise LayoutError("a version does not stand where it did")
    return matches[0], offsets[0]


def find_storage() -> tuple[int, int, int]:
    """Return the words of a TensorImpl's storage and offset, and of a storage's address.

    The offset counts elements. The last is the word of a StorageImpl that holds its address.
    """
    buffers = [bytearray(4 * (n + 64)) for n in range(4)]  # Python objects elsewhere in memory
    whole = [torch.frombuffer(buffer, dtype=torch.float32) for buffer in buffers]
    views = [buffer[3 + 7 * n :] for n, buffer in enumerate(whole)]
    candidates = range(2, IMPL_WORDS)

    def find_words(tells: Callable[[Tensor, int], bool]) -> list[int]:
        return [n for n in candidates if all(tells(t, n) for t in (*whole, *views))]

    points = find_words(lambda t, n: _word(t, n) == open_storage(t)._cdata)
    begins = find_words(lambda t, n: _word(t, n) == t.storage_offset())
    stores = [(open_storage(t), t.data_ptr()) for t in whole]
    data = [n for n in range(2, 6) if all(_at(s._cdata, n) == p for s, p in stores)]
    if not len(points) == len(begins) == len(data) == 1:
        raise LayoutError("a TensorImpl does not tell its storage where it did")
    return points[0], begins[0], data[0]


def find_deleter(storage: int) -> int:
    """Return the word of a storage that holds the function which frees its memory.

    Args:
        storage: the word of a TensorImpl that points to its storage.
    """
    buffers = [bytearray(64) for _ in range(3)]
    borrowed = [torch.frombuffer(buffer, dtype=torch.float32) for buffer in buffers]
    allocated = [torch.empty(n, device="cpu") for n in (3, 5, 900)]

    def values(tensors: list[Tensor], place: int) -> set[int]:
        return {_at(_word(tensor, storage), place) for tensor in tensors}

    def frees(place: int) -> bool:
        of_allocated, of_borrowed = values(allocated, place), values(borrowed, place)
        return (
            len(of_allocated) == len(of_borrowed) == 1
            and 0 not in of_allocated | of_borrowed
            and of_allocated != of_borrowed
        )

    matches = [place for place in range(2, STORAGE_WORDS) if frees(place)]
    if len(matches) != 1:
        raise LayoutError("a storage does not hold the function that frees its memory")
    return matches[0]


def _word(tensor: Tensor, place: int) -> int:
    return _at(tensor._cdata, place)


def _at(address: int, place: int) -> int:
    return ctypes.c_int64.from_address(address + WORD * place).value


def _half(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value
