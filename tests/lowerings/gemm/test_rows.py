"""Products of many rows in Triton, of all kinds: offers, code for GPUs not here, GELU.

Their values by the interpreter are in `test_conv_templates.py`.
"""

import itertools
import re

import pytest
import torch
from msgspec.structs import replace as changed

from ipex_inductor.autotune import select
from ipex_inductor.autotune.record import encode
from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.ops.pointwise import gelu
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import persistent, software_pipelined, weight_stationary
from support import h200
from support.case_sampling import few_with_each
from support.cases.skinny_cases import linear
from support.rendered_templates import binary, signature, source, usage, within_limits

pytestmark = pytest.mark.unit

WINDOW = "padding=0,0 dilation=1,1 transposed=False output_padding=0,0 groups=1"
WORDS = "scalars=() packed=''"


def conv(x, columns, added=False, unary="relu", dtype="bfloat16", stride=1, arch=h200.NAME):
    """A convolution of one pixel, with a bias and what is added."""
    batch, terms, *image = x
    sizes = "x".join(map(str, x))
    other = f"{batch}x{columns}x{'x'.join(map(str, image))}:L" if added else "other=None"
    line = (
        f"ipex.conv.default {dtype} {sizes}:L {columns}x{terms}x1x1:L {columns} {other} "
        f"stride={stride},{stride} {WINDOW} binary='{'add' if added else 'none'}' "
        f"unary='{unary}' {WORDS}"
    )
    (problem,) = shapes.problems([line], arch, {})
    return problem


def offered(problem, name):
    return [call for call in library.calls(problem) if call.name == name]


RESNET = {
    "256<-64": (conv([128, 64, 56, 56], 256, True), 4),
    "512<-128": (conv([128, 128, 28, 28], 512, True), 4),
    "128<-256": (conv([128, 256, 56, 56], 128), 2),
    "64<-256": (conv([128, 256, 56, 56], 64), 1),
    "1024<-256": (conv([128, 256, 14, 14], 1024, True), 1),
    "convnext": (linear("bfloat16", 200704, 512, 128), 4),
}


@pytest.mark.parametrize("name", RESNET)
def test_streamed_where_the_weight_stays(name):
    problem, count = RESNET[name]
    calls = offered(problem, weight_stationary.NAME)
    assert len(calls) == count
    assert all(why_unknown(call.choice) is None for call in calls)


REFUSED = {
    "many terms": conv([128, 512, 28, 28], 128),
    "few rows": conv([1, 64, 56, 56], 256),
    "fp32": conv([128, 64, 56, 56], 256, dtype="float32"),
    "every other pixel": conv([128, 64, 56, 56], 256, stride=2),
    "few rows of a layer": linear("bfloat16", 512, 512, 128),
    "a layer whose weight is turned": changed(
        p := linear("bfloat16", 8192, 512, 128),
        operands=(p.operands[0], changed(p.operands[1], stride=(1, 512)), *p.operands[2:]),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_not_streamed(name):
    assert not offered(REFUSED[name], weight_stationary.NAME)


@pytest.mark.parametrize(
    ("sizes", "arch", "count"),
    [
        ((4096, 3072, 768), h200.NAME, 2),
        ((4096, 3072, 768, "relu", "add"), h200.NAME, 1),  # the wider tile has no registers left
        ((4096, 128, 768), h200.NAME, 1),
        ((8192, 11008, 4096), h200.NAME, 2),
        ((512, 3072, 768), h200.NAME, 0),
        ((4096, 3072, 767), h200.NAME, 0),
        ((4096, 3072, 768), "sm_80:NVIDIA-A100-SXM4-80GB", 0),
    ],
)
def test_persistent_where_arithmetic_binds_on_hopper(sizes, arch, count):
    calls = offered(linear("bfloat16", *sizes, arch=arch), persistent.NAME)
    assert len(calls) == count
    assert all(why_unknown(call.choice) is None for call in calls)
    assert not offered(linear("float32", *sizes, arch=arch), persistent.NAME)


PIXELS = {
    "2048<-512, added": (conv([128, 512, 7, 7], 2048, True), 1),
    "256<-1024": (conv([128, 1024, 14, 14], 256), 2),
    "128<-512": (conv([128, 512, 28, 28], 128), 1),
    "512<-128: few terms": (conv([128, 128, 28, 28], 512), 0),
    "by 2": (conv([128, 512, 28, 28], 256, stride=2), 0),
}


@pytest.mark.parametrize("name", PIXELS)
def test_persistent_for_convolutions_of_single_pixels(name):
    problem, count = PIXELS[name]
    assert len(offered(problem, persistent.NAME)) == count


@pytest.mark.parametrize(
    ("number", "programs"), [pytest.param(0, 132, marks=pytest.mark.slow), (1, 264)]
)
def test_as_many_persistent_programs_as_run_at_once(number, programs, tmp_path, monkeypatch):
    problem = PIXELS["256<-1024"][0]
    call = offered(problem, persistent.NAME)[number]
    code = h200.code_of_call(problem, call, tmp_path, monkeypatch)
    assert f"'PROGRAMS': {programs}," in code


A100, L4, MI300X = "sm_80:NVIDIA-A100-SXM4-80GB", "sm_89:NVIDIA-L4", "gfx942:AMD-Instinct-MI300X"
WIDE = (4096, 3072, 768)


@pytest.mark.parametrize(
    ("sizes", "arch", "count"),
    [
        (WIDE, A100, 6),
        (WIDE, L4, 5),  # which has no room for five stages
        (WIDE, MI300X, 5),
        (WIDE, "sm_86:NVIDIA-A10", 5),
        (WIDE, h200.NAME, 0),
        (WIDE, "sm_100:NVIDIA-B200", 0),
        ((*WIDE, "relu", "add"), A100, 6),
        ((4096, 3001, 768), A100, 6),
        ((4096, 3001, 768, "relu", "add"), A100, 3),  # the others have no registers left
        ((4096, 128, 768), A100, 2),  # of larger ones there are too few
        ((4096, 3072, 767), A100, 0),
        ((4096, 3072, 248), A100, 0),
        ((48, 3072, 768), A100, 0),
        ((0, 3072, 768), A100, 0),
        ((384, 50257, 768), h200.NAME, 4),
        ((384, 50257, 768), "sm_100:NVIDIA-B200", 4),
        ((384, 50257, 768, "relu", "add"), h200.NAME, 3),  # as above
        ((384, 50264, 768), h200.NAME, 0),
        ((64, 50257, 768), h200.NAME, 2),
    ],
)
def test_pipelined_where_no_copy_engine_writes_the_result(sizes, arch, count):
    calls = offered(linear("bfloat16", *sizes, arch=arch), software_pipelined.NAME)
    assert len(calls) == count
    assert all(why_unknown(call.choice) is None for call in calls)
    assert not offered(linear("float32", *sizes, arch=arch), software_pipelined.NAME)


@pytest.mark.parametrize(("arch", "count"), [(A100, 5), (MI300X, 4), (h200.NAME, 0)])
def test_pipelined_for_convolutions_of_single_pixels(arch, count):
    assert len(offered(conv([128, 512, 28, 28], 128, arch=arch), software_pipelined.NAME)) == count
    assert not offered(conv([128, 512, 28, 28], 128, stride=2, arch=arch), software_pipelined.NAME)


def test_nobody_takes_it_who_did_not_measure_it():
    """Where an H200's best has a copy engine, its library's stands in for an A100's best."""
    problem = linear("bfloat16", "64x384", 3072, 768, arch=A100)
    calls = library.calls(problem)
    assert software_pipelined.NAME in {call.name for call in calls}
    (found,) = select.select_by_stand_in(
        {encode(problem): [call.choice for call in calls]}, None
    ).values()
    assert found.choice.name == "aten.addmm"


@pytest.mark.parametrize(
    ("rows", "dtype"), [(2**20, "int64"), pytest.param(2**12, "int32", marks=pytest.mark.slow)]
)
def test_as_many_rows_as_memory_holds(rows, dtype, tmp_path, monkeypatch):
    problem = linear("bfloat16", rows, 3072, 4096, arch=A100)
    call = offered(problem, software_pipelined.NAME)[0]
    code = h200.code_of_call(problem, call, tmp_path, monkeypatch)
    assert f"INDEX_DTYPE : tl.constexpr = tl.{dtype}" in code


PARTS = {"of wider rows": (776, 0), "shifted": (768, 1), "shifted by a vector": (768, 8)}


@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=[pytest.mark.slow] * (n == "of wider rows")) for n in PARTS]
)
def test_what_lies_otherwise_than_rows_of_vectors_is_copied(
    part, tmp_path, monkeypatch, code_alone
):
    wide, begin = PARTS[part]
    tile = [*vars(software_pipelined.tiles("sm_80")[0]).values()]

    def function(memory, weight):
        x = torch.relu(memory).as_strided((4096, 768), (wide, 1), begin)
        return torch.ops.ipex.pipelined(x, weight, None, tile)

    def inputs():
        sizes = [4096 * 776 + 8], [3072, 768]
        return [torch.empty(size, dtype=torch.bfloat16, device="cuda:0") for size in sizes]

    code = h200.code(function, inputs, tmp_path, monkeypatch)
    kernels = re.findall(r"(triton_\w+?)_fused\w*\.run\(", code)
    assert kernels[-1] == "triton_tem"
    assert len(kernels) == (2 if part == "shifted by a vector" else 3)


FUSED = {
    "added": (RESNET["256<-64"][0], weight_stationary.NAME, "in_ptr"),
    "layer": (RESNET["convnext"][0], weight_stationary.NAME, "exp2"),
    "layer of images": (linear("bfloat16", "64x56x56", 512, 128), weight_stationary.NAME, "exp2"),
    "layer of images, added": (
        linear("bfloat16", "64x56x56", 512, 128, "relu", "add"),
        weight_stationary.NAME,
        "in_ptr",
    ),
    "persistent": (linear("bfloat16", 4096, 3072, 768), persistent.NAME, "exp2"),
    "persistent, of pixels, added": (PIXELS["2048<-512, added"][0], persistent.NAME, "in_ptr"),
    "pipelined": (linear("bfloat16", *WIDE, arch=A100), software_pipelined.NAME, "exp2"),
    "pipelined, of pixels, added": (
        conv([128, 512, 7, 7], 2048, True, arch=A100),
        software_pipelined.NAME,
        "in_ptr",
    ),
    "persistent, of words": (linear("bfloat16", "64x384", 3072, 768), persistent.NAME, "exp2"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FUSED)
def test_one_kernel_with_bias_and_epilogue(name, tmp_path, monkeypatch):
    problem, kind, has = FUSED[name]
    code = h200.code_of_call(problem, offered(problem, kind)[-1], tmp_path, monkeypatch)
    assert re.findall(r"(triton_\w+?)_fused\w*\.run\(", code) == ["triton_tem"]
    assert has in code
    assert "libdevice.erf" not in code


OURS = {
    "stem": ("8x3x64x64:L 64x3x7x7:L 64", 2, 3, 1, ""),
    "depthwise": ("4x96x28x28:L 96x1x3x3:L 96", 1, 1, 96, " 4x96x28x28:L"),
    "fprop": ("4x32x28x28:L 24x32x3x3:L 24", 1, 1, 1, " 4x24x28x28:L"),
}


# The others' epilogues are in test_conv_templates.py, too.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "fprop")) for n in OURS]
)
def test_convolutions_have_their_epilogue_in_the_kernel(name, tmp_path, monkeypatch):
    """On a GPU Inductor compares loops as they are: those of an image are not those of rows."""
    sizes, stride, padding, groups, other = OURS[name]
    line = (
        f"ipex.conv.default bfloat16 {sizes}{other or ' other=None'} stride={stride},{stride} "
        f"padding={padding},{padding} dilation=1,1 transposed=False output_padding=0,0 "
        f"groups={groups} binary='{'add' if other else 'none'}' unary='relu' {WORDS}"
    )
    (problem,) = shapes.problems([line], h200.NAME, {})
    call = offered(problem, f"ipex.triton.{name}")[0]
    code = h200.code_of_call(problem, call, tmp_path, monkeypatch)
    last = re.findall(r"(triton_\w+?)_fused(\w*)\.run\(", code)[-1]
    assert last[0] == "triton_tem"
    assert "relu" in last[1]


@pytest.mark.parametrize("unary", ["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"])
@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        (weight_stationary.NAME, h200.NAME),
        (persistent.NAME, h200.NAME),
        (software_pipelined.NAME, A100),
    ],
)
def test_the_epilogue_is_that_of_the_op(kind, arch, unary):
    """In fp64, so that only the order of the sums is another."""
    problem = linear("bfloat16", 4096, 257, 256, unary, arch=arch)
    wide = tuner.to_float64(problem)
    inputs = inputs_of(wide, torch.device("cpu"), seed=0)
    wanted = tuner.function_of(wide)(*inputs)
    (call, *_) = offered(problem, kind)
    result = tuner.function_of(wide, call.body)(*inputs)
    torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12, check_stride=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_a_short_gelu_rounds_as_the_long_one(name, dtype):
    """Of every number of 16 bits; one in 100 is rounded to the other neighbour at most.

    Where torch's own is less than what 1 - 1 leaves in fp32, this one is nearer.
    """
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = every[every.isfinite()]
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh" if "tanh" in name else "none")
    made = getattr(gelu, name)(x.float())
    off = (made.double() - exact).abs()
    assert (off <= 4e-5 * exact.abs() + 2e-7 * x.double().abs().clamp(max=6)).all()
    rounded = made.to(dtype) != exact.to(dtype)
    large = exact.abs() > 1e-3
    assert rounded[large].float().mean() <= 0.01


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_a_short_gelu_of_what_is_not_finite(name):
    x = torch.tensor([torch.inf, torch.nan, -1e30, 1e30, -0.0, 0.0])
    made = getattr(gelu, name)(x)
    assert made[0] == torch.inf
    assert made[1].isnan()
    assert made[2:].tolist() == [0.0, x[3].item(), 0.0, 0.0]


# The first each time: test_every_template.py has a small tile of each dtype for each of them.
GPUS = ("h200", "a100-80gb", "b200", "mi300x")
KERNELS = {
    "streamed": (weight_stationary, weight_stationary.TILES, (401408, 256, 64)),
    "persistent": (persistent, persistent.TILES, (4096, 3072, 768)),
}
EVERY = [
    (kind, tile, dtype, gpu)
    for kind, (_, tiles, _) in KERNELS.items()
    for tile, dtype, gpu in itertools.product(tiles, ("bfloat16", "float16"), GPUS)
]


@pytest.mark.parametrize(
    ("kind", "tile", "dtype", "gpu"),
    few_with_each(EVERY, lambda kind, *others: [kind]),
    ids=str,
)
def test_compiled_where_there_is_no_gpu(kind, tile, dtype, gpu):
    """Nothing spills (an addend by Triton 3.9 some words), and Hopper's instructions are used."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    template, _, sizes = KERNELS[kind]
    target = find_target(gpu)
    programs = target.multiprocessors
    constants = template.constants(*sizes, True, tile, programs) | {"ALLOW_TF32": False}
    added = kind == "streamed" or tile.BLOCK_M * tile.BLOCK_N <= persistent.MOST_ADDED
    kernel = _module(source(template.SOURCE, constants, sizes[1], epilogue=added))["kernel"]
    types = signature(("X", "W"), dtype)
    stages = 2 if target.kind == "hip" else tile.num_stages
    with triton.knobs.cache.scope():
        made = triton.compile(
            ASTSource(
                kernel,
                types,
                constexprs={},
                attrs={(n,): [["tt.divisibility", 16]] for n in range(len(types))},
            ),
            target=GPUTarget(
                target.kind,
                int(target.arch[3:]) if target.kind == "cuda" else target.arch,
                target.subgroup or 32,
            ),
            options={"num_warps": tile.num_warps, "num_stages": stages},
        )
    few = 80 if kind == "persistent" and added else 0  # bytes: 72, and none by Triton 3.6
    if is_offered(kind, tile, target, sizes[2]):
        within_limits(made, gpu, few)
    if gpu != "h200":
        return
    text = made.asm["ptx"]
    assert "wgmma" in text
    if kind == "streamed":
        assert made.metadata.shared <= tile.shared(sizes[2], 2, True)
        # Both what is multiplied and what is added wait in shared memory.
        assert made.asm["ttgir"].count("ttg.async_copy_global_to_local") >= 4
        assert re.search(r"cp\.async\.cg\.shared\.global\S* \[.*?\], \[.*?\], 0x10|, 16", text)
    else:
        assert made.metadata.shared <= tile.shared(2)
        assert "cp.async.bulk.tensor" in text


def is_offered(kind, tile, target, terms):
    """Whether that tile is, there, with an addend."""
    if kind == "persistent":
        return target.arch == "sm_90"
    programs = tile.fitting(target.shared_memory, terms, 2, True)
    return programs * tile.num_stages >= weight_stationary.IN_FLIGHT


ROOMS = ("a100-80gb", "l4", "mi300x", "h200", "b200")
TAILS, ODD = (4099, 3000, 776), (4099, 3001, 776)
PIPELINED = [
    (tile, dtype, gpu, sizes)
    for gpu in ROOMS
    for tile in software_pipelined.tiles(find_target(gpu).arch)
    for dtype, sizes in itertools.product(("bfloat16", "float16"), (WIDE, TAILS, ODD))
    if tile.shared(2, find_target(gpu).arch) <= find_target(gpu).shared_memory
    if sizes == ODD or not find_target(gpu).arch.startswith(software_pipelined.UNEVEN)
]


A_FEW = 16  # bytes that ptxas keeps for itself, of no register (on sm_100)
MULTIPLIES = {
    "sm_80": "mma.sync",
    "sm_89": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
}


@pytest.mark.parametrize(
    ("tile", "dtype", "gpu", "sizes"),
    few_with_each(PIPELINED, lambda tile, dtype, gpu, sizes: (dtype, gpu)),
    ids=str,
)
def test_pipelined_compiles_where_there_is_no_gpu(tile, dtype, gpu, sizes):
    """Nothing spills, with an addend where that may be; on NVIDIA's GPUs steps are copied ahead."""
    target = find_target(gpu)
    constants = software_pipelined.constants(*sizes, True, tile) | {"ALLOW_TF32": False}
    added = sizes != ODD or not tile.is_full(target.subgroup)
    rendered = source(software_pipelined.SOURCE, constants, sizes[1], epilogue=added)
    made = binary(rendered, signature(("X", "W"), dtype), tile, gpu)
    registers, spilled = usage(made)
    assert spilled <= A_FEW
    assert registers * tile.num_warps * target.subgroup <= target.registers
    assert made.metadata.shared <= tile.shared(2, target.arch)
    if target.kind == "cuda":
        text = made.asm["ptx"]
        assert MULTIPLIES[target.arch] in text
        assert text.count("cp.async.cg.shared.global") >= 2 * tile.num_stages
    if target.arch.startswith("sm_8"):
        assert f"cp.async.wait_group {2 * (tile.num_stages - 2)}" in re.sub(r"[\s\t]+", " ", text)
    if target.kind == "hip":
        assert "v_mfma" in made.asm["amdgcn"]
