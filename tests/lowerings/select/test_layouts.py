"""The memory format of an operand, found without a tensor, against torch's answer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipex_inductor.autotune.record import Operand
from ipex_inductor.lowerings.common.calls import is_channels_last

pytestmark = pytest.mark.unit

SIZES = st.lists(st.integers(1, 3), min_size=4, max_size=4)
ORDERS = st.permutations(range(4))


@given(SIZES, ORDERS, st.booleans())
def test_it_agrees_with_torch(sizes, order, gap):
    x = torch.empty([sizes[i] for i in order], device="meta").permute(*map(order.index, range(4)))
    if gap:
        x = torch.empty_strided(x.shape, [2 * n for n in x.stride()], device="meta")
    operand = Operand(tuple(x.shape), x.stride(), "float32")
    assert is_channels_last(operand) == x.is_contiguous(memory_format=torch.channels_last)


def test_only_images_have_it():
    assert not is_channels_last(Operand((2, 3, 4), (12, 1, 3), "float32"))
    assert is_channels_last(Operand((2, 3, 4, 5), (60, 1, 15, 3), "float32"))
