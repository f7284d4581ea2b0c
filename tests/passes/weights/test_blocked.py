"""Products on weights in blocks: what they compute, where they are chosen, and where not."""

import ctypes
import gc
import itertools
import math
import mmap
import os
import re
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipex_inductor
from ipex_inductor.aot_cache import toolkit
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX
from ipex_inductor.lowerings.conv import cached_primitives
from ipex_inductor.ops.gemm.blocked import blocked_gemm as op
from ipex_inductor.passes.attention import short_attention as short_attention_choice
from ipex_inductor.passes.weights import blocked as choice
from ipex_inductor.passes.weights import prologue, upcast
from ipex_inductor.passes.weights import winograd as by_tiles
from ipex_inductor.reporting import decisions
from ipex_inductor.runtime import huge_pages
from ipex_inductor.target.device import as_cpu, current, level
from ipex_inductor.target.x86_levels import LEVELS
from ipex_inductor.templates.build import cpp
from ipex_inductor.templates.cpu import blocked, cpu_library
from support.helpers import code_of

HERE = current("cpu").arch
needs_library = pytest.mark.skipif(blocked.why_not() is not None, reason=f"{blocked.why_not()}")


def needs_row(dtype: torch.dtype) -> pytest.MarkDecorator:
    """Skips where oneDNN's products of that dtype are kept."""
    there = (HERE, dtype) in choice.FASTER and blocked.why_not() is None
    return pytest.mark.skipif(not there, reason=f"oneDNN's products of {dtype} are kept here")


needs, needs_fp32 = needs_row(torch.bfloat16), needs_row(torch.float32)
AMX = "x86-64:amx"
WIDENED = upcast.dtypes()  # computed in fp32 on this CPU
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
PANELS = (64, 16)  # of CPUs with AVX-512, whose graphs may have been compiled for those without
# One rounding of the result: 2^-9 / sqrt(3) of a bf16 in the mean, and the sums' own in fp32.
LIMIT = {torch.bfloat16: 2.5e-3, torch.float32: 2e-6, torch.float16: 3.2e-4}


@pytest.fixture(autouse=True)
def _more_than_on_amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN has AMX few products are ours: tests are of those that AVX-512 has, but some."""
    if HERE == AMX and "rows_of_amx" not in request.fixturenames:
        for dtype in (torch.bfloat16, torch.float32):
            bounds = choice.FASTER["x86-64:avx512_bf16", dtype]
            monkeypatch.setitem(choice.FASTER, (HERE, dtype), bounds)


@pytest.fixture
def rows_of_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ours on a CPU with AMX is ours on this one."""
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setitem(choice.FASTER, (HERE, dtype), choice.FASTER[AMX, dtype])
    monkeypatch.setattr(choice, "PANEL", {})


def relative(result: Tensor, truth: Tensor) -> float:
    """Distance of `result` from `truth`, as a share of its size."""
    return float((result.double() - truth).norm() / truth.norm())


def case(dtype: torch.dtype, rows: int, depth: int, columns: int) -> list[Tensor]:
    """x, weight, bias, other."""
    torch.manual_seed(0)
    x, weight, bias, other = (
        torch.randn(shape)
        for shape in ((rows, depth), (columns, depth), (columns,), (rows, columns))
    )
    return [t.to(dtype) for t in (x, weight / depth**0.5, bias, other)]


@pytest.mark.skipif(
    toolkit.compiler() is None or HERE not in LEVELS, reason="no compiler here, or an unknown CPU"
)
def test_where_there_is_a_compiler_there_is_our_library() -> None:
    """Or all tests of what it computes would be left out, as where there is none."""
    assert cpu_library.why_not() is None


@needs_library
@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        *((1, 256, 65), (3, 2, 17), (13, 70, 130), (64, 128, 64), (65, 66, 63), (0, 8, 8)),
        *((7, 6, 33), (2, 32, 17), (17, 64, 65), (33, 96, 130)),  # of K, the last fit tiles of AMX
    ],
)
def test_every_word_is_computed(
    dtype: torch.dtype, sizes: tuple[int, int, int], panel: int
) -> None:
    """Kernel and reference op against fp64; rows, columns beyond a block; NaNs where none wrote."""
    x, weight, bias, other = case(dtype, *sizes)
    columns = sizes[2]
    arranged = torch.ops.ipex.blocks(weight, panel)
    for (i, binary), (j, unary), biased in itertools.product(
        enumerate(blocked.BINARY), enumerate(blocked.UNARY), (True, False)
    ):
        truth = F.linear(x.double(), weight.double(), bias.double() if biased else None)
        words = {"none": truth, "add": truth + other.double(), "mul": truth * other.double()}
        truth = choice_of(unary)(words[binary])
        rest = [*([bias] if biased else []), *([other] if i else []), columns, biased, i, j]
        out = torch.full_like(other, torch.nan)
        blocked.call(x, arranged, *rest, out=out)
        addend = other if i else None
        plain = op(x, arranged, bias if biased else None, addend, columns, binary, unary, False)
        for result in (out, plain) if sizes[0] else ():
            assert relative(result, truth) < LIMIT[dtype], (binary, unary, biased)


@needs_library
@pytest.mark.parametrize("sizes", [(700, 1024, 900), (900, 1024, 700)])
def test_large_products_are_computed_in_groups_of_blocks(sizes: tuple[int, int, int]) -> None:
    """Four blocks a group where there is AMX, the last group of fewer, rows or columns outside."""
    x, weight, bias, _ = case(torch.bfloat16, *sizes)
    out = torch.full((sizes[0], sizes[2]), torch.nan, dtype=torch.bfloat16)
    blocked.call(x, torch.ops.ipex.blocks(weight, 64), bias, sizes[2], True, 0, 0, out=out)
    truth = F.linear(x.double(), weight.double(), bias.double())
    assert relative(out, truth) < LIMIT[torch.bfloat16]


# What overflows, underflows, changes the formula or has no value.
SPECIAL = (0, -0.0, 1e-30, 1e-4, 0.59, 0.61, -0.61, 9, -9, 88, -88, 100, -104, 3e38, -3e38)
SPECIAL += (float("inf"), float("-inf"), float("nan"))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "arch", [None, pytest.param("x86-64:avx512", marks=pytest.mark.slow), "x86-64:avx2"]
)
def test_words_hold_where_floats_end(arch: str | None, dtype: torch.dtype) -> None:
    """Each word at 18 values, here and built for lesser CPUs, beside torch's own in fp64.

    fp32: some units of 2^-24; numbers of less than 1e-38 may be 0. GELU multiplies by
    0.5 (1 + erf), of which 1.5e-7 is the formula's own, on
    AVX-512 2e-7 that of pieces. bf16: one unit of the last place.
    """
    if arch and level(arch) > level(HERE):
        pytest.skip("of a CPU that has more")
    with as_cpu(arch) if arch else nullcontext():
        library = cpu_library.library.__wrapped__()
    product = library[f"product_{blocked.PRODUCTS[dtype]}"]
    product.restype, product.argtypes = None, blocked.ARGUMENTS
    depth, rtol = (2, 2**-8) if dtype == torch.bfloat16 else (1, 1e-6)
    x = F.pad(torch.tensor(SPECIAL, dtype=dtype).reshape(-1, 1), (0, depth - 1))
    one = torch.ops.ipex.blocks(torch.ones(1, depth, dtype=dtype), 64)
    for number, word in enumerate(blocked.UNARY):
        out = torch.full((len(x), 1), 7, dtype=dtype)
        sizes, pointers = (len(x), depth, 1, 64), (x.data_ptr(), one.data_ptr(), None, None)
        product(*sizes, *pointers, out.data_ptr(), 0, number)
        truth = choice_of(word)(x[:, :1].double()).to(dtype)
        atol = 2e-6 if word.startswith("gelu") else 1e-38
        torch.testing.assert_close(out, truth, rtol=rtol, atol=atol, equal_nan=True)


def choice_of(unary: str):  # type: ignore[no-untyped-def]
    """What the word means, in torch's functions."""
    from ipex_inductor.ops.common.epilogue import UNARY

    return UNARY[unary].fn


def _mapping(room: mmap.mmap) -> tuple[int, int]:
    """Where it begins, and its size."""
    return torch.frombuffer(room, dtype=torch.uint8).data_ptr(), len(room)


def _is_advised(address: int) -> bool:
    """Whether Linux was told to have huge pages there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        first, last, *_ = re.split("[- ]", line)
        if int(first, 16) <= address < int(last, 16):
            flags = next(line for line in lines if line.startswith("VmFlags"))
            return address % huge_pages.HUGE == 0 and "hg" in flags.split()
        while not line.startswith("VmFlags"):
            line = next(lines)
    return False


def test_weights_on_huge_pages_share_them_and_give_them_back() -> None:
    huge_pages.begin_mapping()
    like, shape = torch.empty(0), (3 * huge_pages.HUGE // 16,)
    weights = [huge_pages.on_huge_pages(like, shape) for _ in range(3)]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    assert [weight.unique().tolist() for weight in weights] == [[0], [1], [2]]
    assert huge_pages._last is not None
    room = huge_pages._last()
    assert room is not None
    first, size = _mapping(room)
    assert all(first <= weight.data_ptr() < first + size for weight in weights[1:])
    large = huge_pages.on_huge_pages(like, (huge_pages.ROOM // 2,))
    large.fill_(1)
    assert _mapping(huge_pages._last())[0] != first  # type: ignore[arg-type]
    gone = weakref.ref(room)
    del room, weights, weight
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("columns", [100, 1030])
def test_large_weights_in_blocks_lie_on_huge_pages(columns: int, panel: int) -> None:
    """One behind the other, and none takes more than itself; less than half a page does not."""
    weight = torch.randn(columns, 600).bfloat16()
    huge_pages.begin_mapping()
    arranged = torch.ops.ipex.blocks(weight, panel)
    room = huge_pages._last() if huge_pages._last else None
    first, size = (0, 0) if room is None else _mapping(room)
    assert (first <= arranged.data_ptr() < first + size) == (columns > 1000)
    assert not size or _is_advised(arranged.data_ptr())
    assert arranged.untyped_storage().nbytes() == arranged.nbytes
    back = arranged.transpose(1, 2).reshape(-1, 600)
    assert torch.equal(back[:columns], weight)
    assert not back[columns:].any()


class Bottleneck(nn.Module):
    """Convolutions of one pixel around one of three, as ResNet-50 has them."""

    def __init__(self, wide: int = 256, narrow: int = 128) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(wide, narrow, 1)
        self.middle = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.expand = nn.Conv2d(narrow, wide, 1)
        self.halve = nn.Conv2d(wide, narrow, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, wide, H, W], channels-last."""
        inner = torch.relu(self.middle(torch.relu(self.reduce(x))))
        return self.halve(torch.relu(self.expand(inner) + x))


def chosen() -> int:
    """How many products of the last graph were given to our kernel."""
    events = decisions.reports()[-1].events
    told = [e.reason for e in events if e.subject == "layers on packed weights"]
    told = [reason for reason in told if "GEMM kernel" in reason]
    return int(told[0].split()[0]) if told else 0


def compiled(model: nn.Module, **options: object):  # type: ignore[no-untyped-def]
    """By backend `ipex`; what falls back is an error."""
    torch.compiler.reset()
    decisions.clear()
    asked = {"strict": True, **options}
    return torch.compile(model, backend="ipex", options=asked)


@needs
@torch.no_grad()
def test_convolutions_of_one_pixel_are_chosen_and_follow_their_weights() -> None:
    """Two of four convolutions: not the one of three pixels, not the one with a stride.

    None where all of a net is in fp32, and many pixels are left to oneDNN.
    """
    model = Bottleneck().bfloat16().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 256, 9, 9).bfloat16().to(memory_format=torch.channels_last)
    run = compiled(model)
    most = choice.FASTER[HERE, torch.bfloat16][1].rows
    for _ in range(2):
        result = run(x)
        truth = copy_of(model)(x.double())
        assert chosen() == (2 if most >= 2 * 9 * 9 else 0)
        assert result.is_contiguous(memory_format=torch.channels_last)
        # Four products, each rounded to bf16 once.
        assert relative(result, truth) < 4 * LIMIT[torch.bfloat16]
        model.expand.weight.mul_(2)  # in place, as training does
        model.reduce.weight.add_(0.01)


def copy_of(model: nn.Module) -> nn.Module:
    """The model with the same weights in fp64."""
    import copy

    return copy.deepcopy(model).double()


@pytest.mark.sampled("dtype0")
@torch.no_grad()
@pytest.mark.parametrize("dtype", [pytest.param(d, marks=needs_row(d)) for d in DTYPES])
def test_linear_layers_are_chosen(dtype: torch.dtype) -> None:
    """With GELU, with an addend, with columns that fill no block, behind a transposed input."""
    model = nn.Sequential(nn.Linear(128, 200), nn.GELU(), nn.Linear(200, 130)).to(dtype).eval()
    x = torch.randn(128, 2).to(dtype).t()
    run = compiled(model)
    assert relative(run(x), copy_of(model)(x.double())) < 2 * LIMIT[dtype]
    assert chosen() == 2


@needs
@torch.no_grad()
@pytest.mark.parametrize(
    "inside", [pytest.param(False, marks=pytest.mark.slow), True], ids=["inputs", "inside"]
)
def test_parts_of_images_and_rows_have_gaps(inside: bool) -> None:
    """Halves of an image's channels, an addend too; halves of rows: strides in order, apart."""
    image = torch.randn(2, 256, 3, 5).bfloat16().to(memory_format=torch.channels_last)
    conv = nn.Conv2d(128, 128, 1).bfloat16().eval().to(memory_format=torch.channels_last)
    linear = nn.Linear(128, 128).bfloat16().eval()
    for layer, x in ((conv, image), (linear, torch.randn(2, 3, 256).bfloat16())):
        dim = 1 if x.dim() == 4 else 2
        exactly = copy_of(layer)

        def both(of: nn.Module, x: Tensor, dim: int = dim) -> Tensor:
            first, second = (-x if inside else x).chunk(2, dim)
            return of(first) + second  # type: ignore[no-any-return]

        # What comes in is a part itself, so that its strides are not those of its shape.
        if not inside:
            given = torch.cat([x, x], dim).chunk(2, dim)[1]
            x = given.to(memory_format=torch.channels_last) if dim == 1 else given
        run = compiled(lambda x, of=layer: both(of, x))  # type: ignore[arg-type,misc]
        result = run(x)
        assert chosen() == 1
        assert relative(result, both(exactly, x.double())) < LIMIT[torch.bfloat16]


@needs_fp32
@torch.no_grad()
def test_the_kernels_are_begun_while_a_graph_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a compile, before its products are looked at; not where none of them may be ours."""
    told: list[str] = []
    monkeypatch.setattr(cpu_library, "begin", lambda: told.append("begun"))
    in_blocks = choice.in_blocks
    monkeypatch.setattr(prologue, "in_blocks", lambda p: told.append("looked at") or in_blocks(p))
    compiled(nn.Linear(256, 64))(torch.randn(2, 256))
    assert told == ["begun", "looked at"]
    for model, options in ((nn.Linear(256, 64), {"blocked_products": False}), (nn.ReLU(), {})):
        told.clear()
        compiled(model, **options)(torch.randn(2, 256))
        assert "begun" not in told


@needs_fp32
@torch.no_grad()
def test_why_there_are_no_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "why_not", lambda: "none here")
    compiled(nn.Linear(256, 64))(torch.randn(2, 256))
    events = [(e.kind, e.subject, e.reason) for r in decisions.reports() for e in r.events]
    assert events.count(("missed", "kernels for CPUs", "none here")) == 1
    assert chosen() == 0
    assert cpu_library.why_not_in_cpp() is None
    assert "error" in str(cpp.why_not_taken("int f() { return missing; }", HERE))


@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
def test_nothing_is_in_blocks_where_it_is_switched_off() -> None:
    run = compiled(nn.Linear(128, 64).bfloat16().eval(), blocked_products=False)
    run(torch.randn(4, 128).bfloat16())
    assert chosen() == 0


@needs
@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
def test_what_is_not_faster_or_cannot_be_is_left_to_onednn() -> None:
    """Few columns of x, many rows, an odd depth, a word the kernel lacks."""
    layers, _ = choice.FASTER[HERE, torch.bfloat16]
    few, many = layers.depth - 2, layers.rows + 1
    near = (
        (nn.Linear(few, 64), (4, few)),
        (nn.Linear(128, 64), (many, 128)),
        *([] if torch.bfloat16 in WIDENED else [(nn.Linear(129, 64), (4, 129))]),
        (nn.Sequential(nn.Linear(128, 64), nn.Hardswish()), (4, 128)),
    )
    for model, shape in near:
        x = torch.randn(shape).bfloat16()
        run = compiled(model.bfloat16().eval())
        assert relative(run(x), copy_of(model)(x.double())) < 2 * LIMIT[torch.bfloat16]
        assert chosen() == 0, model


@needs_fp32
@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
def test_more_rows_than_were_measured_are_left_to_onednn() -> None:
    """In fp32: as many as the table says, and one more; of an image too, one pixel a row."""
    layers, images = choice.FASTER[HERE, torch.float32]
    layer, rows = nn.Linear(128, 64).eval(), layers.rows
    cases = [(layer, (count, 128), rows) for count in (rows, rows + 1)]
    for depth in (128, 256):  # of AVX-512 more rows of the second
        most = max(images.rows, images.deep * depth)
        image = nn.Conv2d(depth, 64, 1).eval().to(memory_format=torch.channels_last)
        cases += [(image, (1, depth, count, 1), most) for count in (most, most + 1)]
    for model, shape, most in cases:
        x = torch.randn(shape)
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        assert relative(compiled(model)(x), copy_of(model)(x.double())) < LIMIT[torch.float32]
        assert chosen() == (shape[0] * math.prod(shape[2:]) <= most), shape


@needs_library
@pytest.mark.usefixtures("op_by_op", "rows_of_amx")
@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "sizes", "ours"),
    [
        (torch.float32, (384, 13, 64), True),  # an odd depth, and few
        (torch.bfloat16, (4, 13, 64), False),  # whose columns are multiplied in pairs
        (torch.float32, (64, 64, 1), True),  # 15 columns of zeros, of few rows
        (torch.float32, (4096, 64, 1), False),  # as many, of rows that outweigh oneDNN's call
        (torch.float32, (1024, 64, 48), True),  # all four vectors
        (torch.bfloat16, (64, 64, 64), True),
        (torch.bfloat16, (256, 128, 64), False),  # products that oneDNN has sooner
        (torch.bfloat16, (4, 770, 2304), True),  # few rows: time is that of reading the weight
        (torch.bfloat16, (5, 770, 2304), False),
        (torch.bfloat16, (128, 768, 1024), True),  # whole tiles
    ],
)
def test_on_amx_what_outweighs_onednns_call_is_ours(
    dtype: torch.dtype, sizes: tuple[int, int, int], ours: bool
) -> None:
    """As was measured with `benchmarks/studies/blocked.py`'s clock, one thread."""
    if dtype in WIDENED:
        pytest.skip(f"{dtype} is computed in fp32 here, by the row of fp32")
    rows, depth, columns = sizes
    model = nn.Sequential(nn.Linear(depth, columns), nn.ReLU()).to(dtype).eval()
    x = torch.randn(rows, depth).to(dtype)
    assert relative(compiled(model)(x), copy_of(model)(x.double())) < LIMIT[dtype]
    assert chosen() == ours


@pytest.mark.sampled("dtype1")
@needs_library
@pytest.mark.usefixtures("rows_of_amx")
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_change_where_no_number_of_them_is_slow(dtype: torch.dtype) -> None:
    """Called from C++ with a size that is a symbol, of a batch of rows too."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 33)).to(dtype).eval()
    run = compiled(model)
    for rows in (5, 64, 3):  # 4 times as many: at first few enough for bf16's tiles
        x = torch.randn(rows, 4, 32).to(dtype)
        torch._dynamo.mark_dynamic(x, 0)
        result = run(x)
        assert relative(result, copy_of(model)(x.double())) < 2 * LIMIT[dtype]
        assert result.is_contiguous()
        assert len(decisions.reports()) == 1
    assert chosen() == 2


class Gathered(nn.Module):
    """A result that a product reads, and behind it, in the graph, a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, y: Tensor, place: Tensor) -> Tensor:
        """x and y [rows, 32], place [edges] -> [rows, 32]."""
        z = x.fmod(y)
        to = place.flip(0)[:, None].expand(-1, z.shape[1])
        gathered = torch.zeros_like(z).scatter_add(0, to, z[place])
        return self.own(z) + self.others(gathered)


@needs_fp32
@pytest.mark.usefixtures("rows_of_amx")  # others leave 32 columns of x to oneDNN
@torch.no_grad()
def test_what_a_product_reads_is_computed_once() -> None:
    """And not again at each place of a gather: as often as in Inductor's own code."""
    model = Gathered().eval()
    x, y, place = torch.randn(48, 32), torch.randn(48, 32), torch.randint(48, (96,))
    code = "".join(code_of(compiled(model), x, y, place))
    assert chosen() == 2
    torch.compiler.reset()
    plain = "".join(code_of(torch.compile(model), x, y, place))
    assert code.count("fmod(") == plain.count("fmod(") > 0


@needs
@torch.no_grad()
def test_a_cached_graph_is_right_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was filled elsewhere: torch's ops then."""
    model = Bottleneck().bfloat16().eval().to(memory_format=torch.channels_last)
    x = torch.randn(1, 256, 5, 5).bfloat16().to(memory_format=torch.channels_last)
    run = compiled(model)
    expected = run(x)
    assert chosen() == 2
    monkeypatch.setattr(blocked, "why_not", lambda: "for this test")
    assert relative(run(x), expected.double()) < 4 * LIMIT[torch.bfloat16]


CHILD = """
import sys
import torch
sys.path.insert(0, {tests!r})
from passes.weights.test_blocked import Bottleneck, chosen, compiled, copy_of, relative
dtype = getattr(torch, sys.argv[1])
torch.manual_seed(0)
model = Bottleneck().to(dtype).eval().to(memory_format=torch.channels_last)
x = torch.randn(2, 256, 14, 14).to(dtype).to(memory_format=torch.channels_last)
with torch.no_grad():
    run = compiled(model)
    run(x)
    result = run(x)
    error = relative(result, copy_of(model)(x.double()))
print("told", torch.backends.cpu.get_cpu_capability(), chosen(), error, flush=True)
"""


def child(dtype: str, **limits: str) -> tuple[str, int, float]:
    """CPU capability, products by our kernel, and error, of a process."""
    tests = str(Path(__file__).parents[2])
    root = os.path.dirname(os.path.dirname(ipex_inductor.__file__))
    env = {**os.environ, **limits, "PYTHONPATH": os.pathsep.join([root, tests])}
    command = [sys.executable, "-c", CHILD.format(tests=tests), dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = re.search(r"^told (\S+) (\d+) (\S+)$", done.stdout, re.MULTILINE)
    assert told, done.stdout
    return told[1], int(told[2]), float(told[3])


@torch.no_grad()
def test_no_reorder_stands_between_convolutions(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Counted in oneDNN's own log of a second call."""
    # Kept primitives (extra `onednn`) are of another oneDNN, which torch's log tells nothing of.
    monkeypatch.setattr(cached_primitives, "why_not", lambda packaged: "not wanted")
    monkeypatch.setattr(by_tiles, "FASTER", {})  # nor of our own
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = Bottleneck().to(dtype).eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 256, 14, 14).to(dtype).to(memory_format=torch.channels_last)
    run = compiled(model)
    run(x)
    with torch.backends.mkldnn.verbose(1):
        run(x)
    ctypes.CDLL(None).fflush(None)
    log = capfd.readouterr().out
    done = [line.split(",")[5] for line in log.splitlines() if ",primitive,exec," in line]
    assert done.count("convolution") >= 2, log
    assert "reorder" not in done, log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "isa"), [("avx2", "AVX2"), ("avx512", "AVX512_CORE"), ("avx512", "ALL")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lesser_cpus_compute_the_same(capability: str, isa: str, dtype: str) -> None:
    """Torch's and oneDNN's code for CPUs without AVX-512, without its bf16 products, and all."""
    if level(f"x86-64:{capability}") > level(HERE):
        pytest.skip("of a CPU that has more")
    limits = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa}
    came, ours, error = child(dtype, **limits)
    assert came.lower() == capability or "x86" not in HERE
    assert ours == 0 or capability == "avx512"
    assert error < 4 * LIMIT[getattr(torch, dtype)]


class Mixed(nn.Module):
    """Products of every kind, and attention over what lies in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(128, 256, 1)
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor, hidden: Tensor, some: Tensor) -> Tensor:
        """x [2, 128, 4, 8] channels-last; hidden [2, 32], some [32, 32] masks -> [2, 32, 256]."""
        y = self.conv(x).relu().permute(0, 2, 3, 1).reshape(2, 32, 256)
        y = y + self.second(F.gelu(self.first(y)))
        q = y.view(2, 32, 4, 64).transpose(1, 2)
        padded = F.pad(y, (0, 1))[:, :, :256].unflatten(2, (4, 64)).transpose(1, 2)  # odd strides
        attend = F.scaled_dot_product_attention
        parts = attend(q, q, q, is_causal=True), attend(q, padded, q, hidden[:, None, None])
        parts += attend(q[:, :, :3], q, padded, some[:3], scale=0.5), attend(q, q, q)
        joined = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], 1)
        return joined + self.second(self.first(y[:, :1]))


@pytest.mark.slow  # 40 seconds
@torch.no_grad()
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, marks=needs),
        pytest.param(torch.float32, marks=[needs_fp32, pytest.mark.slow]),
    ],
)
def test_a_package_has_them_in_its_code(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are called in C++: no library of ours is loaded, and the CPU's needs are said."""
    torch.manual_seed(0)
    model = Mixed().eval().to(dtype).to(memory_format=torch.channels_last)
    x = torch.randn(2, 128, 4, 8).to(dtype).to(memory_format=torch.channels_last)
    given = x, torch.randn(2, 32).to(dtype), torch.randn(32, 32).to(dtype)
    path = tmp_path / "model.ipexbundle"
    made = ipex_inductor.package(model, given, path)
    told = {event.subject: event.reason for event in made.report.events if event.kind == "choice"}
    # Three of four are of more.
    queries = short_attention_choice.FASTER.get((HERE, dtype), (0,))[0]
    assert not queries or told["attention over few keys"].startswith(
        "4 by" if queries == math.inf else "1 by"
    )
    many = (HERE, dtype) in choice.FASTER and choice.FASTER[HERE, dtype][0].rows >= 64
    products = 5 if many else 2  # else those of few rows
    assert told["layers on packed weights"].startswith(f"{products} by this package's GEMM kernel")
    bundle = open_bundle(path, True, True)
    (found,) = (bundle.load(item.key + SUFFIX) for item in bundle.manifest.entries)
    _, entry = unpack_any(found)
    assert {"avx512_bf16"} & LEVELS[HERE].has <= set(entry.meta["needs"])
    run = ipex_inductor.load(path, weights=model.state_dict(), allow_unsigned=True)
    truth = copy_of(model)(*(t.double() for t in given))
    monkeypatch.setattr(cpu_library.LIBRARY, "library", None)  # nor called
    result = run(*given)
    assert result.stride() == model(*given).stride()
    # Eight operations one behind another, each rounded once.
    assert relative(result, truth) < 8 * LIMIT[dtype]
