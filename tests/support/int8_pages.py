"""A process whose int8 kernels read and write tensors at the ends of pages.

`python -m support.int8_pages` puts them behind a page without access, then before one.
It dies of a kernel that touches a byte too much.
"""

import ctypes
import mmap

import torch
from torch import Tensor

from ipex_inductor.templates.cpu import int8
from support.int8_ops import make_operands
from support.int8_tables import CASES, POOLS, as_images, compute_pool, random_integers

PROT_NONE = 0
_maps: list[mmap.mmap] = []  # which tensors do not hold


def move_to_edge(value: Tensor, at_end: bool) -> Tensor:
    """Return a copy with the same strides that begins, or ends, beside a page without access."""
    size = value.untyped_storage().nbytes()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)
    _maps.append(pages)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for start in (0, mmap.PAGESIZE + room):
        address = ctypes.c_void_p(flat.data_ptr() + start)
        assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) == 0
    start = mmap.PAGESIZE + (room - size if at_end else 0)
    own = flat[start : start + size].view(value.dtype)
    return own.as_strided(value.shape, value.stride()).copy_(value)


def run(at_end: bool) -> int:
    """Run each case of the tables; return how many."""
    for case in CASES:
        operands = make_operands(case)
        like = operands.in_kernels_layout(operands.by_reference())
        expected = operands.by_kernel(torch.zeros_like(like))
        for name in ("x", "weight", "factors", "scales", "other", "row_scales"):
            value = getattr(operands, name)
            if value is not None:
                setattr(operands, name, move_to_edge(value, at_end))
        out = operands.by_kernel(move_to_edge(torch.zeros_like(expected), at_end))
        assert torch.equal(out, expected), case
        _maps.clear()
    for shape, words in POOLS:
        x = as_images(random_integers(shape, torch.uint8))
        expected = compute_pool(x, words)
        out = move_to_edge(torch.zeros_like(expected), at_end)
        int8.pool(move_to_edge(x, at_end), *words, out=out)
        assert torch.equal(out, expected), shape
    return len(CASES) + len(POOLS)


if __name__ == "__main__":
    print(run(at_end=False) + run(at_end=True))
