"""Where torch's objects keep what Python would ask of them one by one.

No header tells: each is found by looking at tensors of which it is known, and raises
`NotBuiltError` where it does not stand in exactly one place. Words are of 8 bytes.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ipex_inductor.templates.build.cpp import NotBuiltError

WORD = ctypes.sizeof(ctypes.c_void_p)
IMPL_WORDS = 24  # of a TensorImpl, at least
STORAGE_WORDS = 7  # of a StorageImpl, at least
INLINE = 5  # dimensions whose sizes and strides lie in it
KINDS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def place_of_impl() -> int:
    """Bytes from the begin of a tensor's object to what `_cdata` takes longer to say."""
    seen = [torch.empty(n, device="cpu") for n in range(4)]
    seen += [nn.Parameter(tensor) for tensor in seen]

    def stands(place: int) -> bool:
        found = (ctypes.c_void_p.from_address(id(t) + WORD * place).value for t in seen)
        return all(one == t._cdata for one, t in zip(found, seen, strict=True))

    words = vars(torch._C)["TensorBase"].__basicsize__ // WORD
    places = [WORD * place for place in range(2, words) if stands(place)]  # two are Python's own
    if len(places) != 1:
        raise NotBuiltError("a tensor's object does not hold its TensorImpl where it did")
    return places[0]


def negative_key() -> tuple[int, int]:
    """Which word of a TensorImpl holds the dispatch keys, and the bit that negates what is read."""
    plain = [torch.empty((n + 1,) * n, device="cpu") for n in range(6)]
    turned = [torch._neg_view(tensor) for tensor in plain]
    found = []
    for place in range(2, IMPL_WORDS):  # one is virtual functions', one counts references
        ours, theirs = ({_word(t, place) for t in each} for each in (plain, turned))
        (bit, *more) = {one ^ other for one in ours for other in theirs}
        if len(ours) == len(theirs) == 1 and not more and bit.bit_count() == 1:
            found += [(place, bit)] if theirs.pop() & bit else []
    if len(found) != 1:
        raise NotBuiltError("a TensorImpl does not hold its dispatch keys where it did")
    return found[0]


def dtype() -> int:
    """Which word of a TensorImpl tells its dtype, in its lower 16 bits."""
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int64)
    tensors = [[torch.empty(n, 3, dtype=d, device="cpu") for n in (2, 2, 5)] for d in kinds]

    def tells(place: int) -> bool:
        found = [{_word(t, place) & 0xFFFF for t in alike} for alike in tensors]
        return all(len(each) == 1 for each in found) and len(set.union(*found)) == len(kinds)

    places = [place for place in range(2, IMPL_WORDS) if tells(place)]
    if len(places) != 1:
        raise NotBuiltError("a TensorImpl does not hold its dtype where it did")
    return places[0]


def sizes(place: int) -> list[int]:
    """The bytes of an element for each number that may stand there for a dtype; 0: unknown."""
    found = [0] * 256
    for kind in KINDS:
        tensor = torch.empty(0, dtype=kind, device="cpu")
        found[_word(tensor, place) & 0xFF] = tensor.element_size()
    return found


def dimensions() -> int:
    """Which word of a TensorImpl tells how many dimensions it has.

    Behind it are five sizes, then five strides; of more dimensions, where they lie.
    """
    sizes = [(), (7,), (3, 5), (2, 3, 7), (5, 2, 4, 3), (3, 2, 5, 4, 7), (2, 3, 4, 5, 6, 7, 8)]
    tensors = [torch.empty(each, device="cpu") for each in sizes]
    tensors += [t.permute([*reversed(range(t.dim()))]) for t in tensors]

    def tells(tensor: Tensor, place: int) -> bool:
        count = tensor.dim()
        if _word(tensor, place) != count:
            return False
        begin, apart = tensor._cdata + WORD * (place + 1), INLINE
        if count > INLINE:
            begin, apart = _word(tensor, place + 1), count
        words = (ctypes.c_int64 * (apart + count)).from_address(begin)
        return (*words[:count], *words[apart:]) == (*tensor.shape, *tensor.stride())

    places = []
    for place in range(2, IMPL_WORDS - 2 * INLINE):
        if all(tells(t, place) for t in tensors):  # the longest last: their words are an address
            places.append(place)
    if len(places) != 1:
        raise NotBuiltError("a TensorImpl does not hold its sizes where it did")
    return places[0]


@torch.inference_mode(False)
def python_object(theirs: ctypes.CDLL) -> int:
    """Which word of a TensorImpl tells the object that Python has of it, 0 where it has none."""
    tensors = [torch.empty(n, device="cpu") for n in range(4)]
    tensors += [nn.Parameter(tensor) for tensor in tensors]
    found = [n for n in range(2, IMPL_WORDS) if all(_word(t, n) == id(t) for t in tensors)]
    alone = ctypes.POINTER(ctypes.c_void_p)()
    kind = theirs.aoti_torch_dtype_float32(), theirs.aoti_torch_device_type_cpu(), 0
    theirs.aoti_torch_empty_strided(ctypes.c_int64(0), None, None, *kind, ctypes.byref(alone))
    if len(found) == 1 and alone:
        place = alone[0] + WORD * found[0]
        nothing = ctypes.c_void_p.from_address(place).value
        theirs.aoti_torch_delete_tensor_object(alone)
        if nothing is None:
            return found[0]
    raise NotBuiltError("a TensorImpl does not tell its object where it did")


@torch.inference_mode(False)
def version() -> tuple[int, int]:
    """Which word of a TensorImpl points to its version, and how many bytes behind it that is."""
    bases = [torch.zeros(8, device="cpu") for _ in range(5)]
    for number, base in enumerate(bases):
        for _ in range(3 * number):
            base.add_(1)
    groups = [(base, base.detach(), base.data) for base in bases]  # the last has its own

    def points(place: int) -> bool:
        found = [[_word(t, place) for t in group] for group in groups]
        return all(own == shared not in (0, apart) for own, shared, apart in found)

    words = [place for place in range(2, IMPL_WORDS) if points(place)]
    if len(words) != 1:
        raise NotBuiltError("a TensorImpl does not point to its version where it did")
    counters = [(_word(base, words[0]), base._version) for base in bases]
    behind = [n for n in range(WORD, 3 * WORD, 4) if all(_half(c + n) == v for c, v in counters)]
    if len(behind) != 1:
        raise NotBuiltError("a version does not stand where it did")
    return words[0], behind[0]


def storage() -> tuple[int, int, int]:
    """Which words of a TensorImpl point to its storage and tell where it begins in that.

    And which word of a storage tells its address. An offset counts elements.
    """
    kept = [bytearray(4 * (n + 64)) for n in range(4)]  # whose objects lie elsewhere
    whole = [torch.frombuffer(each, dtype=torch.float32) for each in kept]
    views = [each[3 + 7 * n :] for n, each in enumerate(whole)]
    words = range(2, IMPL_WORDS)

    def where(tells: Callable[[Tensor, int], bool]) -> list[int]:
        return [n for n in words if all(tells(t, n) for t in (*whole, *views))]

    points = where(lambda t, n: _word(t, n) == t.untyped_storage()._cdata)
    begins = where(lambda t, n: _word(t, n) == t.storage_offset())
    stores = [(t.untyped_storage(), t.data_ptr()) for t in whole]
    data = [n for n in range(2, 6) if all(_at(s._cdata, n) == p for s, p in stores)]
    if not len(points) == len(begins) == len(data) == 1:
        raise NotBuiltError("a TensorImpl does not tell its storage where it did")
    return points[0], begins[0], data[0]


def deleter(storage: int) -> int:
    """Return which word of a storage holds the function that frees its memory.

    Args:
        storage: which word of a TensorImpl points to its storage.
    """
    kept = [bytearray(64) for _ in range(3)]
    borrowed = [torch.frombuffer(each, dtype=torch.float32) for each in kept]
    own = [torch.empty(n, device="cpu") for n in (3, 5, 900)]

    def words(tensors: list[Tensor], place: int) -> set[int]:
        return {_at(_word(tensor, storage), place) for tensor in tensors}

    def frees(place: int) -> bool:
        ours, theirs = words(own, place), words(borrowed, place)
        return len(ours) == len(theirs) == 1 and 0 not in ours | theirs and ours != theirs

    found = [place for place in range(2, STORAGE_WORDS) if frees(place)]
    if len(found) != 1:
        raise NotBuiltError("a storage does not hold the function that frees its memory")
    return found[0]


def _word(tensor: Tensor, place: int) -> int:
    return _at(tensor._cdata, place)


def _at(address: int, place: int) -> int:
    return ctypes.c_int64.from_address(address + WORD * place).value


def _half(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value
