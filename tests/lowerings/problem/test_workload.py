"""Problems: read from a graph, written down, and run again as what they were."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.autotune.ranges import points
from ipex_inductor.autotune.record import Symbol, decode_problem, encode
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.problem.node_problem import _record_sizes, problem_of
from ipex_inductor.lowerings.problem.workload import (
    function_of,
    inputs_of,
    operands_by_name,
    to_float64,
)
from ipex_inductor.lowerings.tune import tuner

aten = torch.ops.aten
M = torch.randn(6, 8)
W = torch.randn(8, 10)
B = torch.randn(10)
X = torch.randn(2, 6, 9, 9)
K = torch.randn(4, 3, 3, 3)
CPU = torch.device("cpu")


def gelu(x):
    return F.gelu(x, approximate="tanh")


# Function, operands, the op, how many ops follow it in its epilogue.
CASES = {
    "mm": (torch.mm, (M, W), aten.mm.default, 0),
    "mm, relu": (lambda a, b: (a @ b).relu(), (M, W), aten.mm.default, 1),
    "transposed": (torch.mm, (M, W.t().contiguous().t()), aten.mm.default, 0),
    "addmm": (torch.addmm, (B, M, W), aten.addmm.default, 0),
    "addmm, alpha": (lambda *a: torch.addmm(*a, alpha=2.5), (B, M, W), aten.addmm.default, 0),
    "addmm, gelu": (lambda *a: F.gelu(torch.addmm(*a)), (B, M, W), aten.addmm.default, 1),
    "bmm, scale, mask": (
        lambda a, b, m, fill: torch.where(m, torch.bmm(a, b) * 0.125, fill),
        (torch.randn(2, 5, 4), torch.randn(2, 4, 5), torch.ones(2, 5, 5).tril().bool(), B[0]),
        aten.bmm.default,
        2,
    ),
    "conv": (
        lambda x, w, b: F.conv2d(x, w, b, 2, (1, 0), groups=2),
        (X, K, torch.randn(4)),
        aten.convolution.default,
        0,
    ),
    "conv without bias, silu": (
        lambda x, w: F.silu(F.conv2d(x, w, None, groups=2)),
        (X, K),
        aten.convolution.default,
        1,
    ),
    "residual": (lambda a, b, c: (a @ b + c).relu() * 2, (M, W, M @ W), aten.mm.default, 3),
    "used twice": (lambda a, b: (y := a @ b) * y.sigmoid(), (M, W), aten.mm.default, 2),
    "read before and after": (
        lambda a, b: ((y := a @ b), y.relu()),
        (M, W),
        aten.mm.default,
        0,  # the product itself leaves
    ),
    "reduced": (lambda a, b: (a @ b).relu().sum(), (M, W), aten.mm.default, 1),
    "widened by an addend": (
        lambda a, b, c: (a @ b).relu() + c,
        (M, W, torch.randn(3, 6, 10)),
        aten.mm.default,
        1,
    ),
}


def problem(fn, operands, op, **more):
    graph = make_fx(fn, tracing_mode="fake", **more)(*operands).graph
    (node,) = graph.find_nodes(op="call_function", target=op)
    return problem_of(node, "test", {})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_problem_is_what_it_was_read_from(name, dtype):
    fn, operands, op, follows = CASES[name]
    operands = [t.to(dtype) if t.is_floating_point() else t for t in operands]
    found = problem(fn, operands, op)
    again = decode_problem(encode(found))
    assert again == found
    assert found.epilogue.count("(") == follows
    given = inputs_of(again, CPU, seed=0)
    for have, want in zip(given, operands, strict=False):
        assert (have.shape, have.dtype, have.stride()) == (want.shape, want.dtype, want.stride())
    if name not in ("read before and after", "reduced", "widened by an addend"):
        assert len(given) == len(operands)
        torch.testing.assert_close(function_of(again)(*given), fn(*given), rtol=0, atol=0)
    assert problem(function_of(again), given, op) == found


@pytest.mark.parametrize("name", CASES)
def test_wide_is_the_same_in_fp64(name):
    """Also where the epilogue casts: that of a decomposed GELU in bf16 does."""
    fn, operands, op, _ = CASES[name]
    low = [t.bfloat16() if t.is_floating_point() else t for t in operands]
    table = torch._inductor.decomposition.select_decomp_table()
    wide = to_float64(problem(fn, low, op, decomposition_table=table))
    given = inputs_of(wide, CPU, seed=1)
    assert all(t.dtype in (torch.float64, torch.bool) for t in given)
    if name in ("read before and after", "reduced", "widened by an addend"):
        return
    # Inductor's GELU multiplies by 1/sqrt(2), given to 16 digits.
    torch.testing.assert_close(function_of(wide)(*given), fn(*given), rtol=1e-12, atol=1e-14)


def test_one_element_stands_for_all_where_a_stride_is_zero():
    found = problem(torch.addmm, (B.expand(6, 10), M, W), aten.addmm.default)
    bias = inputs_of(found, CPU, seed=0)[0]
    assert bias.stride() == (0, 1)
    assert torch.equal(bias[0], bias[5])
    assert bias.std() > 0


def test_inputs_depend_on_the_seed_alone():
    found = problem(torch.mm, (M, W), aten.mm.default)
    first, again, other = (inputs_of(found, CPU, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def dynamic(fn, op, *operands, **mode):
    """The problem of `op` where the first dimension of the first operand varies."""
    seen = []

    def backend(gm, example_inputs):
        (node,) = gm.graph.find_nodes(op="call_function", target=op)
        for n in gm.graph.nodes:
            n.meta["val"] = n.meta.get("example_value")
        seen.append(problem_of(node, "test", {}))
        return gm.forward

    for operand in operands:
        if operand.shape[0] == operands[0].shape[0]:
            torch._dynamo.mark_dynamic(operand, 0, **mode)
    torch.compile(fn, backend=backend, fullgraph=True)(*operands)
    return seen[0]


def test_a_size_that_varies_is_known_by_the_powers_of_two_about_it():
    found = dynamic(aten.mm.default, aten.mm.default, torch.randn(100, 8), W)
    assert found.symbols == (Symbol("n0", 65, 128),)
    assert [o.shape for o in found.operands] == [("n0", 8), (8, 10)]
    assert decode_problem(encode(found)) == found
    middle, end = points(found)
    assert [p.operands[0].shape for p in (middle, end)] == [(91, 8), (128, 8)]
    assert not middle.symbols
    given = inputs_of(middle, CPU, seed=0)
    torch.testing.assert_close(function_of(middle)(*given), given[0] @ given[1])


def test_its_own_range_may_be_narrower():
    found = dynamic(aten.mm.default, aten.mm.default, torch.randn(100, 8), W, min=70, max=110)
    assert found.symbols == (Symbol("n0", 70, 110),)


def test_a_product_of_sizes_is_a_size_and_strides_are_of_them():
    def fn(x, w):
        return aten.mm.default(x.reshape(-1, 8), w)

    found = dynamic(fn, aten.mm.default, torch.randn(100, 3, 8), W)
    assert found.symbols == (Symbol("n0", 257, 512),)
    assert found.operands[0].shape == ("n0", 8)
    turned = torch.randn(50, 4, 6).transpose(1, 2)

    def keep(x, y):
        return aten.bmm.default(x.transpose(0, 2).contiguous().transpose(0, 2), y)

    found = dynamic(keep, aten.bmm.default, turned, torch.randn(50, 4, 3))
    assert found.operands[0].stride == (1, "n0", "6*n0")
    assert points(found)[1].operands[0].stride == (1, 64, 384)


def test_of_a_list_of_tensors_it_has_each_and_their_number():
    graph = make_fx(lambda *parts: torch.cat(parts, 1).relu(), tracing_mode="fake")(M, M + 1).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    found = decode_problem(encode(problem_of(node, "test", {})))
    assert found.constants == {"tensors": 2, "dim": 1}
    assert [*operands_by_name(found)] == ["tensors0", "tensors1"]
    first, second = inputs_of(found, CPU, seed=0)
    wanted = torch.cat([first, second], 1).relu()
    assert torch.equal(function_of(found)(first, second), wanted)


def test_lists_in_which_a_tensor_may_be_missing_are_no_problem():
    graph = make_fx(lambda x, n: x[:, n], tracing_mode="fake")(M, torch.tensor([0, 1])).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    assert problem_of(node, "test", {}) is None


@pytest.mark.parametrize(
    "epilogue",
    [
        "__import__('os').system('true')",
        "y.__class__",
        "open('x')",
        "os.system.x('')",
        "x7",
        "(y)(",
    ],
)
def test_an_epilogue_is_ops_of_torch_and_nothing_else(epilogue):
    """Records may come from others."""
    from msgspec.structs import replace

    found = replace(problem(torch.mm, (M, W), aten.mm.default), epilogue=epilogue)
    with pytest.raises((ValueError, AttributeError, KeyError, SyntaxError)):
        function_of(found)(M, W)


CONV = (
    "aten.convolution.default {} 4x32x14x14:L 48x32x3x3:L 48 stride=1,1 padding=1,1 dilation=1,1 "
    "transposed=False output_padding=0,0 groups=1"
)
LINEAR = "aten.addmm.default {} 96 64x768 768x96:T"
MM = "aten.mm.default {} 64x768 768x96:T"
BMM = "aten.bmm.default {} 6x32x64 6x64x48"


def without(y, i, op, drop):
    """The op on factors of which the last `drop` terms of each sum are left out."""
    x, w = i[-2:]
    parts = [x[..., :-drop] @ w[..., :-drop, :]]
    return (i[0] + parts[0]) if op == "addmm" else parts[0]


# Problem, and what a kernel that is wrong makes of the right result and the operands.
WRONG = {
    "the bias alone": (LINEAR, lambda y, i: i[0].expand_as(y).contiguous()),
    "the convolution's bias alone": (
        CONV,
        lambda y, i: torch.empty_like(y).copy_(i[2].view(1, -1, 1, 1).expand_as(y)),
    ),
    "half of the sum": (LINEAR, lambda y, i: without(y, i, "addmm", 384)),
    "a tile less": (MM, lambda y, i: without(y, i, "mm", 16)),
    "a term less": (MM, lambda y, i: without(y, i, "mm", 1)),
    "sigmoid of nothing": (
        MM + " -> aten.sigmoid.default(y)",
        lambda y, i: torch.full_like(y, 0.5),
    ),
    "the epilogue of nothing": (
        BMM + " -> aten.add.Tensor(y, 1.0)",
        lambda y, i: torch.ones_like(y),
    ),
    "no epilogue": (BMM + " -> aten.relu.default(y)", lambda y, i: torch.bmm(*i)),
    "zero": (BMM, lambda y, i: torch.zeros_like(y)),
    "a row less": (BMM, lambda y, i: y.index_fill(1, torch.tensor(31), 0)),
    "NaN where it is none": (
        BMM + " -> aten.sqrt.default(aten.abs.default(y))",
        lambda y, i: y.masked_fill(y == y.max(), float("nan")),
    ),
    "a comparison turned round": (BMM + " -> aten.gt.Scalar(y, 0)", lambda y, i: ~y),
}


def trial(line, dtype):
    (found,) = shapes.problems([line.format(dtype)], "test", {})
    return tuner._trial(found, CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_does_not_compute_the_product_is_wrong(name, dtype):
    """Also where a bias could hide it, an epilogue flatten it, or low precision excuse it."""
    line, spoil = WRONG[name]
    given = trial(line, dtype)
    right = function_of(given.problem)(*given.inputs)
    assert given.judge.why_wrong(right) is None
    wrong = spoil(right, given.inputs)
    if name == "a term less" and dtype == "bfloat16":
        return  # of 768, less than the rounding of the result
    reason = given.judge.why_wrong(wrong)
    assert reason
    assert "wrong by" in reason, "not by its layout"


@pytest.mark.parametrize("epilogue", ["sqrt", "log", "rsqrt"])
def test_what_has_no_value_is_not_judged_and_the_rest_is(epilogue):
    given = trial(f"{BMM} -> aten.{epilogue}.default(y)", "bfloat16")
    right = function_of(given.problem)(*given.inputs)
    assert right.isnan().any()
    assert given.judge.why_wrong(right) is None
    assert given.judge.why_wrong(right * 1.5)


def test_what_has_next_to_no_values_cannot_be_judged():
    with pytest.raises(ValueError, match="hardly ever finite"):
        trial(BMM + " -> aten.log.default(aten.sub.Tensor(y, 9.0))", "float32")


def test_infinite_constants_are_written_as_literals():
    fn = lambda a, b: torch.mm(a, b).clamp(max=float("inf")) + float("-inf")  # noqa: E731
    found = problem(fn, (M, W), aten.mm.default)
    assert found.epilogue.count("1e999") == 2
    assert torch.equal(function_of(found)(M, W), fn(M, W))


def test_torchs_names_of_symbols_and_ours_are_no_matter():
    """Two that change places: what is one's name is the other's."""
    import sympy

    a, b = sympy.symbols("n1 n0", integer=True, positive=True)
    assert _record_sizes([a, b, 8 * b, a * b], {a: "n0", b: "n1"}) == ("n0", "n1", "8*n1", "n0*n1")


def test_the_smallest_range_has_more_than_one_size():
    found = dynamic(aten.mm.default, aten.mm.default, torch.randn(2, 8), W)
    assert found.symbols == (Symbol("n0", 2, 4),)
