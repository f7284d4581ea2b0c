"""The gradient of a stem's weight without a GPU: values, binaries, generated code."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace as changed
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode

from ipex_inductor import compat, lowerings
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.autotune.record import Record, encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.autotune.space import why_refused
from ipex_inductor.lowerings.problem import selector_hook, shapes
from ipex_inductor.lowerings.problem.node_problem import problem_of
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library, peaks
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.ops.conv.small_channel import runs
from ipex_inductor.passes.engine.whole_ops import reduced_table
from ipex_inductor.passes.joint import WHOLE, JointPass
from ipex_inductor.passes.pass_context import PassSettings
from ipex_inductor.prebuild import described as described_gpu
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import conv_small_channel_weight
from ipex_inductor.templates.triton.conv_small_channel_weight import NAME, TILES
from support import h200, rendered_templates
from support.autotune.autotune_records import PROVENANCE, timed
from support.case_sampling import few_with_each
from support.cases.conv_weight_cases import CASES, CLOSE, RANDOM
from support.rendered_templates import signature, source, usage

pytestmark = pytest.mark.unit


def test_shapes_are_many():
    assert len({(*map(str, (c["x"], c["weight"], c["stride"], c["last"])),) for c in CASES}) >= 40


SOME = (CASES[11:44:11], CASES[44:54:5], CASES[54:62:4], CASES[62:63])
QUICK_ONES = [*itertools.chain(*SOME)]  # of each kind some: shapes, tiles, planted, moved


@pytest.mark.parametrize(
    "cases",
    [
        QUICK_ONES,
        pytest.param(CASES, marks=pytest.mark.slow),
        pytest.param(RANDOM, marks=pytest.mark.slow),
    ],
    ids=["some", "all", "drawn"],
)
def test_values_by_the_interpreter(cases, tmp_path):
    """Against float64, into memory full of NaN, with what is no number beside windows."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = rendered_templates.__file__
    done = subprocess.run(
        [sys.executable, program, str(file)], env=env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, f"{done.stdout[-100:]} {done.stderr[-2000:]}"
    errors = [float(line.split()[1]) for line in done.stdout.splitlines()]
    wrong = [(e, c) for c, e in zip(cases, errors, strict=True) if not e <= CLOSE]
    assert not wrong


# Of nets: image, weight, stride, padding.
STEMS = {
    "resnet": ([128, 3, 224, 224], [64, 3, 7, 7], 2, 3),
    "efficientnet": ([128, 3, 224, 224], [32, 3, 3, 3], 2, 1),
    "mobilenetv3": ([128, 3, 224, 224], [16, 3, 3, 3], 2, 1),
    "convnext": ([128, 3, 224, 224], [128, 3, 4, 4], 4, 0),
    "vit": ([128, 3, 224, 224], [768, 3, 16, 16], 16, 0),
}


def fitting(x, weight, stride, padding, gpu, itemsize=2):
    """The tiles that are offered there."""
    around = [stride] * 2, [padding] * 2, True
    found = runs(x[1:], weight[2:], *around)
    terms, room = conv_small_channel_weight.terms_of(found), find_target(gpu).shared_memory
    return [
        tile
        for tile in TILES
        if conv_small_channel_weight.fits(tile, weight[0], found)
        and tile.fitting(room, terms, itemsize)
    ]


def compiled(tile, dtype, gpu, x, weight, stride, padding, steps=48):
    """The kernel alone by Triton, for a GPU that is not here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target, around = find_target(gpu), ([stride] * 2, [padding] * 2, True)
    sizes = x[0], x[1:], weight[0], weight[2:]
    constants = conv_small_channel_weight.constants(*sizes, *around, steps, tile)
    given = {**constants, "ALLOW_TF32": False}
    text = source(conv_small_channel_weight.SOURCE, given, constants["TERMS"], epilogue=False)
    types = signature(("GRAD", "X"), dtype, "float32")
    arch = int(target.arch[3:]) if target.kind == "cuda" else target.arch
    with triton.knobs.cache.scope():
        return triton.compile(
            ASTSource(
                _module(text)["kernel"],
                types,
                constexprs={},
                attrs={(n,): [["tt.divisibility", 16]] for n in range(len(types))},
            ),
            target=GPUTarget(target.kind, arch, target.subgroup or 32),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        )


A_FEW = 16  # bytes that ptxas keeps for itself, of no register
# Some words of a thread's 1 kB, in tiles that are not the best there (A100: 64 x 64 and 64 x 128;
# H200 and B200: 128 x 16). The tuner sees what it costs.
A_LITTLE = 128
GPUS = ("a100-80gb", "h200", "b200", "mi300x")
EACH = [
    (name, tile, dtype, gpu)
    for name, gpu, dtype in itertools.product(STEMS, GPUS, ("bfloat16", "float16"))
    for tile in fitting(*STEMS[name], gpu)
]
BEST = {**dict.fromkeys(GPUS, ("resnet", TILES[5])), "mi300x": ("efficientnet", TILES[2])}
EACH.sort(key=lambda each: each[:2] != BEST[each[3]])


# A B200 as an H200, whose kernels are looked at alike: test_every_template.py has each of them.
@pytest.mark.parametrize(
    ("name", "tile", "dtype", "gpu"),
    few_with_each(EACH, lambda name, tile, dtype, gpu: (dtype, gpu.replace("b200", "h200"))),
    ids=str,
)
def test_compiles_where_there_is_no_gpu(name, tile, dtype, gpu):
    """Without spills, for as many programs as are to fit on a multiprocessor."""
    x, weight, stride, padding = STEMS[name]
    target, made = find_target(gpu), compiled(tile, dtype, gpu, *STEMS[name])
    found = runs(x[1:], weight[2:], [stride] * 2, [padding] * 2, True)
    terms = conv_small_channel_weight.terms_of(found)
    assert made.metadata.shared <= target.shared_memory
    registers, spilled = usage(made)
    assert spilled <= (A_FEW if (name, tile) == BEST[gpu] else A_LITTLE)
    if "ptx" not in made.asm:
        return
    fitting = tile.fitting(target.shared_memory, terms, 2)
    assert registers * tile.num_warps * 32 * fitting <= 65536
    assert made.metadata.shared * fitting <= target.shared_memory
    copies = re.findall(
        r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", made.asm["ptx"]
    )
    if target.arch == "sm_80":  # where the gradient passes through registers
        return
    of_image = {"convnext": "8", "vit": "10"}.get(name, "4")
    if weight[0] < 64:  # few channels of the gradient pass through registers
        assert set(copies) == {of_image}
        return
    assert set(copies) == {of_image, "10"}
    assert "ld.global" not in made.asm["ptx"], "nothing passes through registers"
    if target.arch == "sm_90":
        assert "wgmma" in made.asm["ptx"]


H200 = h200.NAME
AROUND = "stride=2,2 padding=3,3 dilation=1,1 groups=1"
RESNET = f"128x64x112x112:L 128x3x224x224:L 64x3x7x7:L {AROUND}"


def problem(text=RESNET, dtype="bfloat16", arch=H200, **settings):
    (found,) = shapes.problems([f"ipex.conv_weight_grad.default {dtype} {text}"], arch, settings)
    return found


def offered(found):
    return [call.parameters for call in library.calls(found) if call.name == NAME]


def test_what_is_offered_for_resnet():
    calls = library.calls(problem())
    assert [call.name for call in calls] == ["aten.convolution_backward", *[NAME] * 4]
    assert all(call.parameters["BLOCK_N"] == 64 for call in calls[1:])


SMALL = f"2x32x9x8:L 2x3x18x16:L 32x3x7x7:L {AROUND}"
REFUSED = {
    "fp32": problem(SMALL, "float32"),
    "fp64": problem(SMALL, "float64"),
    "five channels": problem(SMALL.replace("x3x", "x5x")),
    "a contiguous gradient": problem(SMALL.replace("2x32x9x8:L", "2x32x9x8")),
    "dilated": problem(SMALL.replace("dilation=1,1", "dilation=2,2").replace("9x8", "6x5")),
    "in groups": problem(
        f"2x32x9x8:L 2x4x18x16:L 32x2x7x7:L {AROUND.replace('groups=1', 'groups=2')}"
    ),
    "nothing": problem(SMALL.replace("2x32x", "0x32x").replace("2x3x", "0x3x")),
    "a CPU": changed(problem(SMALL), arch="x86_64:avx2"),
    "an input with room": changed(
        p := problem(SMALL),
        operands=(p.operands[0], changed(p.operands[1], stride=(1000, 1, 50, 3)), p.operands[2]),
    ),
    "two dtypes": changed(
        p := problem(SMALL), operands=(*p.operands[:2], changed(p.operands[2], dtype="float32"))
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    assert not offered(REFUSED[name])


def test_offered_besides():
    for text in (SMALL, SMALL.replace("18x16:L", "18x16"), SMALL.replace("x3x", "x1x")):
        assert offered(problem(text))
        assert offered(problem(text, "float16", "gfx942:AMD-Instinct-MI300X"))


def test_records_may_name_it():
    found = problem()
    outcomes = tuple(timed(call.choice, 10.0) for call in library.calls(found))
    assert why_refused(Record(found, outcomes, PROVENANCE)) is None


def test_what_is_moved_is_counted():
    moved, operations = peaks.work(problem())
    operands = 128 * 64 * 112 * 112 + 128 * 3 * 224 * 224 + 64 * 3 * 49
    assert moved == 2 * (operands + 64 * 3 * 49)
    assert operations == 2 * 128 * 112 * 112 * 64 * 3 * 49


def drawn(seed):
    draw = random.Random(seed)
    window, stride, padding = (
        [draw.randint(*ends) for _ in "hw"] for ends in ((1, 7), (1, 4), (0, 3))
    )
    image = [
        draw.randint(max(1, reach - 2 * p), 40) for reach, p in zip(window, padding, strict=True)
    ]
    size = [
        (side + 2 * p - reach) // step + 1
        for side, p, reach, step in zip(image, padding, window, stride, strict=True)
    ]
    batch, channels, made = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 200)
    layout, of_weight = draw.choice(("", ":L")), draw.choice(("", ":L"))
    both = "{0[0]},{0[1]}".format
    return (
        f"{batch}x{made}x{size[0]}x{size[1]}:L {batch}x{channels}x{image[0]}x{image[1]}{layout} "
        f"{made}x{channels}x{window[0]}x{window[1]}{of_weight} stride={both(stride)} "
        f"padding={both(padding)} dilation=1,1 groups=1"
    )


@pytest.mark.parametrize("text", [RESNET.replace("128x", "1x"), *map(drawn, range(20))])
def test_every_call_computes_the_same(text):
    """In fp64, so that only the order of the sums is another; of a sensible size."""
    found = problem(text)
    inputs = inputs_of(found, torch.device("cpu"), seed=0)
    wide = tuner.to_float64(found)
    wanted = tuner.function_of(wide)(*(each.double() for each in inputs))
    assert 0.1 < wanted.abs().max() < 20
    calls = [call for call in library.calls(found) if call.name == NAME]
    assert calls
    for call in calls:
        result = tuner.function_of(wide, call.compute)(*(each.double() for each in inputs))
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
        half = tuner.function_of(found, call.compute)(*inputs)
        assert half.dtype == torch.bfloat16
        assert (half.double() - wanted).abs().max() <= wanted.abs().max() * 2**-8


@pytest.mark.sampled("0")
@pytest.mark.parametrize("number", range(4))
def test_two_kernels_for_an_h200(number, tmp_path, monkeypatch):
    """Ours, and one of Inductor's that adds up, rounds and arranges."""
    call = [call for call in library.calls(problem()) if call.name == NAME][number]
    code = h200.code_of_call(problem(), call, tmp_path, monkeypatch)
    launched = [name.split("_fused_")[0] for name in re.findall(r"(triton_\w+)\.run\(", code)]
    assert launched[0] == "triton_tem"
    assert set(launched[1:]) <= {"triton_red", "triton_per", "triton_poi"}
    assert len(launched) <= 3
    assert "extern_kernels." not in code
    assert "convolution_backward.default(" not in code
    assert code.count("tl.dot(") == {32: 5, 64: 3}[call.parameters["BLOCK_K"]]


def step_of(x, weight):
    """A stem of a net in channels-last, which has no cuDNN here that says so."""
    made = F.conv2d(x, weight.bfloat16(), None, 2, 3)
    return F.relu(made.contiguous(memory_format=torch.channels_last))


GRADIENT, IMAGE = torch.ops.ipex.conv_weight_grad.default, torch.ops.ipex.conv.default
SUBJECTS = {GRADIENT: "weight gradient", IMAGE: "conv"}


@pytest.fixture
def trained(monkeypatch, tmp_path, code_alone):
    """Forward and backward for an H200 that is not here; without `choose` Inductor's."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    lowerings.register()
    codes = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))

    def of(choose=None, function=step_of, asks=False, op=GRADIENT):
        def asked(node):
            return choose(node) if node.target is op else library.Chooser({})(node)

        given, report = {"config_patches": {"fx_graph_cache": False}}, GraphReport()
        if choose is not None:
            joint = JointPass("a test", PassSettings(training=True, choose=asked), report, [])
            given["config_patches"]["joint_custom_pre_pass"] = joint
            given["decompositions"] = reduced_table(WHOLE)
        last = {"memory_format": torch.channels_last}
        with (
            described_gpu.device(find_target("h200")),
            FakeTensorMode(allow_non_fake_inputs=True),
            compat.backward_at_once(),
        ):
            x = torch.empty(8, 3, 64, 64, device="cuda", dtype=torch.bfloat16).to(**last)
            weight = torch.empty(64, 3, 7, 7, device="cuda").to(**last).requires_grad_()
            inputs = [x.requires_grad_(asks), weight]
            compile_fx(torch.fx.symbolic_trace(function), inputs, **given)
        *_, forward, backward = codes
        # The first line numbers what was compiled.
        events = [event for event in report.events if event.subject == SUBJECTS[op]]
        made = [code.partition("\n")[2] for code in (forward, backward)]
        return made, SimpleNamespace(events=events)

    return of


def chosen(number):
    """The `Choose` of who has a record of what is met, that says so."""
    known = {}

    def choose(node):
        found = problem_of(node, selector_hook.arch_of(node.meta["val"].device), {})
        choice = library.calls(found)[number].choice
        known[encode(found)] = Selection(Estimate(choice, 5.0, 0.01), None, "recorded")
        return library.Chooser(known)(node)

    return choose


def test_a_backward_without_a_record_is_inductors(trained):
    """To the byte."""
    usual, _ = trained()
    made, report = trained(library.Chooser({}))
    assert made == usual
    assert "convolution_backward" in made[1]
    (event,) = report.events
    assert (event.kind, event.subject) == ("choice", "weight gradient")
    assert event.reason == "aten.convolution_backward: nothing is recorded of 5 choices"
    made, report = trained(chosen(0))
    assert made == usual
    assert report.events[0].reason.startswith("aten.convolution_backward")


def test_a_backward_with_a_record_has_our_kernel(trained):
    usual, _ = trained()
    (forward, backward), report = trained(chosen(2))
    assert "convolution_backward.default(" not in backward
    assert len(re.findall(r"triton_tem_\w+\.run\(", backward)) == 1
    assert re.fullmatch(rf"{NAME} BLOCK_M=.*: 5 us, recorded", report.events[0].reason)
    (result,) = re.findall(r"return \(None, (buf\d+), \)", backward)
    assert (
        f"{result} = empty_strided_cuda((64, 3, 7, 7), (147, 1, 21, 3), torch.float32)" in backward
    )
    assert "extern_kernels.convolution(" in forward
    assert "extern_kernels.convolution(" in usual[0]


@pytest.mark.slow  # as a backward; forward kernels with their epilogue: test_rows.py
def test_a_forward_with_a_record_has_our_kernel(trained):
    usual, _ = trained()
    (forward, backward), report = trained(chosen(2), op=IMAGE)
    assert "extern_kernels.convolution(" not in forward
    assert len(re.findall(r"triton_tem_\w+\.run\(", forward)) == 1
    assert "ipex.triton.stem" in report.events[0].reason
    assert "convolution_backward.default(" in backward
    assert "extern_kernels.convolution(" in usual[0]


def with_bias(x, weight):
    bias = weight.bfloat16().sum((1, 2, 3))
    made = F.conv2d(x, weight.bfloat16(), bias, 2, 3)
    return F.relu(made.contiguous(memory_format=torch.channels_last))


@pytest.mark.slow  # two graphs more, which differ in that sum alone
def test_a_bias_makes_no_difference_without_a_record(trained):
    usual, _ = trained(None, with_bias)
    none, _ = trained(library.Chooser({}), with_bias)
    assert none == usual


def test_a_bias_makes_no_difference(trained):
    """Its gradient is a sum of its own to Inductor on a GPU."""
    (_, backward), _ = trained(chosen(1), with_bias)
    assert "convolution_backward.default(" not in backward
    assert "triton_tem_" in backward


def of_five(x, weight):
    return step_of(torch.cat([x, x[:, :2]], 1), torch.cat([weight, weight[:, :2]], 1))


# Of five channels nothing is offered, either: above.
@pytest.mark.parametrize(
    ("function", "asks"), [(step_of, True), pytest.param(of_five, False, marks=pytest.mark.slow)]
)
def test_what_is_not_asked_about(trained, function, asks):
    """An input with a gradient, more than a few channels."""

    def choose(node):
        raise AssertionError("it is asked about")

    usual, _ = trained(None, function, asks)
    made, report = trained(choose, function, asks)
    assert made == usual
    assert not report.events
