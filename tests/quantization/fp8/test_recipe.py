"""Recipes: formats, and fields that are checked."""

import pytest
import torch

from ipex_inductor.errors import OptionError
from ipex_inductor.quantization.fp8 import DelayedScaling, Format

pytestmark = pytest.mark.unit


def test_the_defaults_are_those_of_ipex():
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.interval, recipe.fp8_format) == (0, 1, Format.HYBRID)
    assert (recipe.amax_history_len, recipe.amax_compute_algo) == (1024, "max")
    assert recipe.reduce_amax


def test_formats_name_the_ranges_of_their_dtypes():
    for format in Format:
        assert torch.finfo(format.forward_dtype).max == format.value.max_fwd
        assert torch.finfo(format.gradient_dtype).max == format.value.max_bwd
    assert Format.HYBRID.forward_dtype is torch.float8_e4m3fn
    assert Format.HYBRID.gradient_dtype is torch.float8_e5m2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("margin", 0.5),
        ("margin", True),
        ("interval", 0),
        ("fp8_format", "hybrid"),
        ("amax_history_len", 0),
        ("amax_history_len", 2.0),
        ("amax_compute_algo", "min"),
        ("amax_compute_algo", max),
        ("override_linear_precision", (False, False, True)),
        ("scaling_factor_compute_algo", max),
        ("reduce_amax", 1),
    ],
)
def test_wrong_values_are_refused_by_name(field, value):
    with pytest.raises(OptionError, match=field):
        DelayedScaling(**{field: value})
