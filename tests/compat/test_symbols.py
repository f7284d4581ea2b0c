"""Fake tensors with symbolic sizes: what torch versions say of their memory."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from ipex_inductor import compat

pytestmark = pytest.mark.unit

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MADE = {
    "as it is": lambda x, last: x,
    "copied": lambda x, last: x.clone(memory_format=last),
    "computed": lambda x, last: x.clone(memory_format=last) + 1,
    "permuted": lambda x, last: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "back again": lambda x, last: x.clone(memory_format=last).contiguous(),
    "a channel too many": lambda x, last: x.clone(memory_format=last)[:, 1:],
    "rows apart": lambda x, last: x.clone(memory_format=last)[..., 1:],
}
SHAPES = (2, 8, 9, 10), (1, 8, 9, 10), (2, 1, 9, 10), (2, 8, 5, 9, 10)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channels_last_of_a_fake_tensor_is_that_of_a_real_one(shape, name):
    """Torch 2.11 denies it of copies with symbolic sizes."""
    last = LAST[len(shape)]
    real = torch.randn(shape)
    wanted = MADE[name](real, last).is_contiguous(memory_format=last)
    for dynamic in itertools.product((False, True), repeat=2):  # the batch, the image
        kinds = [DimDynamic.DYNAMIC if d else DimDynamic.STATIC for d in dynamic]
        dims = [kinds[0], DimDynamic.STATIC, *[kinds[1]] * (len(shape) - 2)]
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fake = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))
        with mode:
            assert compat.is_channels_last(MADE[name](fake, last)) == wanted


def test_other_numbers_of_dimensions_have_no_such_format():
    assert not compat.is_channels_last(torch.randn(3, 4, 5))
