"""Operands that problems of 8-bit integers are tuned with."""

import pytest
import torch

from ipex_inductor.autotune.record import Operand, Problem
from ipex_inductor.lowerings.problem.workload import function_of, inputs_of

pytestmark = pytest.mark.unit

SIZES = {"x": (64, 96), "weight": (32 * 128,), "factors": (2, 32), "scales": (7,)}
DTYPES = {"x": "int8", "weight": "int8", "factors": "float32", "scales": "float32"}
WORDS = {"other": None, "row_scales": None, "binary": "none", "unary": "none", "scalars": ()}


def test_results_use_the_range_of_their_integers():
    """Random scales would give one number for all elements, which hides wrong kernels."""
    steps = {(7,): (1,), (32 * 128,): (1,), (64, 96): (96, 1), (2, 32): (32, 1)}
    operands = tuple(Operand(SIZES[name], steps[SIZES[name]], DTYPES[name]) for name in SIZES)
    constants = WORDS | {"dtype": "torch.int8"}
    problem = Problem("ipex.int8_linear.default", operands, "cpu", constants)
    inputs = inputs_of(problem, torch.device("cpu"), 0)
    result = function_of(problem)(*inputs).float()
    assert 20 < result.std() < 100
    assert ((result == -128) | (result == 127)).float().mean() < 0.2  # few are clamped
