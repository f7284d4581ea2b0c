"""Eager calls that stand in for a library's kernel and Inductor's kernel behind it."""

import pytest
import torch

from ipex_inductor.lowerings.problem.workload import function_of, inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import epilogue_stand_in as stand_in
from support.first_call_problems import CONV, LINEAR, problem

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


def run(line, name):
    """The problem, its operands by name, and the result of a call's run."""
    found = problem(line)
    (call,) = (c for c in library.calls(found) if c.name == name)
    operands = inputs_of(found, CPU, 0)
    result = stand_in.run_of_call(found, call)(operands)
    return found, operands, result


@pytest.mark.parametrize("name", ["aten.convolution", "aten.mm"])
def test_a_product_gets_one_kernel_behind_it(name):
    """One in place: a ReLU without an addend, a sum with one, neither without an epilogue."""
    window = CONV["1x1"]
    _, (x, weight, bias), result = run(window, name)
    product = torch.conv2d(x, weight)
    torch.testing.assert_close(result, product.relu())
    _, (x, weight, bias, other), result = run(CONV["1x1 add"], name)
    torch.testing.assert_close(result, torch.conv2d(x, weight) + other)
    plain = CONV["1x1"].replace(" 16 other", " bias=None other").replace("'relu'", "'none'")
    _, (x, weight), result = run(plain, name)
    torch.testing.assert_close(result, torch.conv2d(x, weight))
    assert bias.shape == (16,)


def test_a_gemm_adds_its_bias():
    _, (x, weight, bias), result = run(LINEAR, "aten.addmm")
    torch.testing.assert_close(result, torch.nn.functional.linear(x, weight, bias).relu())


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (CONV["3x3"], "cudnn.convolution_relu"),
        (CONV["3x3 add"], "cudnn.convolution_add_relu"),
        (CONV["1x1"], "cublaslt.addmm_activation"),
        (LINEAR, "cublaslt.addmm_activation"),
    ],
)
def test_a_call_with_its_epilogue_is_itself(line, name):
    found, operands, result = run(line, name)
    torch.testing.assert_close(result, function_of(found)(*operands))


@pytest.mark.parametrize("line", [CONV["3x3 add"], LINEAR])
def test_two_rows_of_operands_give_two_rows_of_the_result(line):
    found = problem(line)
    rows, operands = stand_in.rows_of_problem(found), inputs_of(found, CPU, 0)
    compute = function_of(found)
    few = compute(*rows.of_operands(operands))
    whole = compute(*operands)
    torch.testing.assert_close(few, rows.of_result(whole))
    assert len(few) == 2
    torch.testing.assert_close(few[-1], whole[-1])
