"""Products of few rows: interpreted on the CPU, and compiled for GPUs that are not here."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from math import ceil
from pathlib import Path

import pytest
import torch
import triton
from msgspec.structs import replace as changed

from ipex_inductor import lowerings
from ipex_inductor.autotune.record import Record
from ipex_inductor.autotune.space import why_refused, why_unknown
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.target import device as target
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build import gpu
from ipex_inductor.templates.triton import skinny
from ipex_inductor.templates.triton.skinny import (
    JOINED,
    ONE_ROW,
    Tile,
    inductor_source,
    source,
    tiles,
)
from support import h200
from support.autotune.autotune_records import PROVENANCE, timed
from support.case_sampling import few_with_each
from support.cases import skinny_cases
from support.cases.skinny_cases import DTYPES, SHAPES, linear, offered, options, product

pytestmark = pytest.mark.unit

GPUS = ("a100-80gb", "h200", "b200", "mi300x")
BINARY = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def right(whole=False, of=lambda tile: True):
    """A third of the shapes in a dtype each, or all in all; where Triton interprets, as below."""
    for tile, *given in skinny_cases.cases("cpu", whole):
        if of(tile):
            skinny_cases.check(tile, *given, errors=4)


def far_apart():
    """Of memory that is only asked for, one page a row is ever touched."""
    x = torch.empty(17 << 27, dtype=torch.float16).as_strided((17, 40), (1 << 27, 1))
    x.copy_(torch.randn(17, 40))
    weight = torch.randn(7, 40).half()
    tile = next(tiles(False))
    exact = x.double() @ weight.double().t()
    # Sums of 40 products in fp32.
    torch.testing.assert_close(product(tile, x, weight).double(), exact, rtol=1e-4, atol=1e-4)


def edited(file, old, new):
    """Return a reader of kernel texts that finds `new` for `old` in one file."""
    read = skinny.read_kernel_text

    def read_edited(name):
        text = read(name)
        return text.replace(old, new) if name.endswith(f"{file}.py.jinja") else text

    return read_edited


def without_a_term(file):
    """As `right`, by a kernel that leaves out the last term."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skinny, "read_kernel_text", edited(file, "(k < K)", "(k < K - 1)"))
        right()


def without_the_other_part():
    """As `right`, where the last part of two is all."""
    with pytest.MonkeyPatch.context() as patch:
        reader = edited("skinny_joined", "result +=", "left_out =")
        patch.setattr(skinny, "read_kernel_text", reader)
        right(of=lambda tile: tile.joined)


INTERPRETED = """
import json, traceback
import sys
import test_skinny as mine
told = {}
for call in sys.argv[1:]:
    try:
        eval(f"mine.{call}")
        told[call] = ""
    except Exception:
        told[call] = traceback.format_exc()
print(json.dumps(told))
"""


CALLS = (
    "right()",
    "far_apart()",
    "without_a_term('skinny_one_row')",
    "without_a_term('skinny_few_rows')",
    "without_the_other_part()",
)


def called(home, *calls):
    """What each raised, in one process in which Triton interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(home)}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", INTERPRETED, *calls]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return called(tmp_path_factory.mktemp("home"), *CALLS)


def test_values_against_fp64(interpreted):
    assert all(sum((m == 1) == one_row for m, _, _ in SHAPES) >= 40 for one_row in (True, False))
    assert not interpreted["right()"]


@pytest.mark.slow
def test_all_values_against_fp64(tmp_path):
    assert not called(tmp_path, "right(True)")["right(True)"]


@pytest.mark.parametrize("part", ["skinny_one_row", "skinny_few_rows"])
def test_the_comparison_sees_one_term_that_is_missing(part, interpreted):
    assert "AssertionError" in interpreted[f"without_a_term({part!r})"]


def test_the_comparison_sees_a_part_that_is_missing(interpreted):
    assert "AssertionError" in interpreted["without_the_other_part()"]


def test_rows_that_lie_far_apart(interpreted):
    """Beyond 2^31 elements, as the last of 32768 tokens in each of 32 texts."""
    assert not interpreted["far_apart()"]


def one_row(tile):
    """Whether it is for one row, whatever its stages."""
    return any(tile._replace(stages=t.stages) == t for t in ONE_ROW)


def compiled(tile, dtype, gpu_name, rows=None, columns=4096, size=4096):
    """The kernel as machine code, for rows and a weight that are contiguous."""
    rows = rows or (1 if one_row(tile) else skinny.MOST)
    given = f"*{BINARY[dtype]}"
    sizes = {"M": rows, "N": columns, "K": size}
    strides = {"x_stride": size, "x_step": 1, "weight_stride": size}
    return gpu.binary(
        source(one_row(tile), tile),
        "product",
        find_target(gpu_name),
        (),
        {"x": given, "weight": given, "y": "*fp32", **({"work": "*u8"} if tile.joined else {})},
        {**sizes, **strides, **tile.parameters(rows, size, dtype.itemsize)},
        options(tile),
    )


def takes(entry, folder):
    """Registers, bytes of stack and of shared memory, as the binary for an NVIDIA GPU says."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", said_of(entry, folder, "-res-usage"))
    return int(found[1]), int(found[2]), entry.meta["shared"]


def sass(entry, folder):
    """Its instructions."""
    return said_of(entry, folder, "-sass")


def said_of(entry, folder, what):
    """By NVIDIA's tool, which Triton brings."""
    file = Path(folder, "kernel.cubin")
    file.write_bytes(entry.blob)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, file], capture_output=True, text=True, check=True).stdout


# The tiles of one width of steps are compiled alike, whatever the number of parts. A B200 is as an
# H200: test_every_template.py has each of them.
@pytest.mark.parametrize(
    ("tile", "dtype", "gpu_name"),
    few_with_each(
        itertools.product((*ONE_ROW, *skinny.ROWS), DTYPES, GPUS),
        lambda tile, dtype, gpu_name: [
            (one_row(tile), each) for each in (dtype, gpu_name.replace("b200", "h200"))
        ],
    ),
    ids=str,
)
def test_compiled_where_there_is_no_gpu(tile, dtype, gpu_name, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    within_limits(tile, dtype, gpu_name, tmp_path)
    if tile in skinny.ROWS:
        within_limits(tile, dtype, gpu_name, tmp_path, rows=16, columns=11008, size=4100)


def within_limits(tile, dtype, gpu_name, folder, **sizes):
    """No spills, registers for two programs of a multiprocessor, and memory for one."""
    device = find_target(gpu_name)
    rows = sizes.get("rows", skinny.MOST)
    if device.kind == "hip":  # which has memory for two stages, and where none is offered so far
        tile = tile._replace(stages=min(tile.stages, 2))
    entry = compiled(tile, dtype, gpu_name, **sizes)
    assert entry.blob[:4] == b"\x7fELF"
    assert entry.meta["shared"] <= device.shared_memory
    if device.kind == "cuda":
        registers, stack, shared = takes(entry, folder)
        # The A100's compiler keeps what fp32 multiplies without tensor cores on the stack.
        assert stack <= (512 if (dtype, device.arch) == (torch.float32, "sm_80") else 0)
        assert registers * tile.warps * 32 * 2 <= device.registers
        assert shared <= tile.shared(rows, dtype.itemsize)


@pytest.mark.parametrize(
    "tiles",
    [
        (ONE_ROW[1], skinny.ROWS[-1]),
        pytest.param((ONE_ROW[-1], skinny.ROWS[1]), marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_every_load_of_the_weight_is_sixteen_bytes(tiles, tmp_path, monkeypatch):
    """Where rows are whole vectors, also in the last step, which is not whole."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    for tile in tiles:
        entry = compiled(tile, torch.bfloat16, "h200", size=4104)
        wide = re.findall(r"LDG(?:STS)?\.E\S*\.128", sass(entry, tmp_path))
        assert len(wide) >= tile.columns * tile.step // (16 * 32 * tile.warps), tile


# One thread's exchange, which releases a part's sums and acquires the other's.
EXCHANGE = ["MEMBAR.ALL.GPU", "ATOMG.E.EXCH.64.STRONG.GPU", "CCTL.IVALL"]


@pytest.mark.sampled
@pytest.mark.parametrize("tile", JOINED, ids=str)
def test_parts_meet_in_order(tile, tmp_path, monkeypatch):
    """All threads' stores before it, all threads' loads behind it."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    within_limits(tile, torch.bfloat16, "h200", tmp_path, rows=16)
    code = sass(compiled(tile, torch.bfloat16, "h200", rows=16), tmp_path)
    _, behind = code.rsplit("MMA", 1)
    told = re.findall(r"(?:STG|LDG\.|BAR\.SYNC|MEMBAR|ATOMG|CCTL)[\w.]*", behind)
    at = told.index(EXCHANGE[0])
    assert told[at : at + len(EXCHANGE)] == EXCHANGE
    before, after = told[:at], told[at + len(EXCHANGE) :]
    assert {name[:3] for name in before} == {"STG", "BAR"}
    assert before[-1].startswith("BAR")
    assert after[0].startswith("BAR")
    loads = [name for name in after if name.startswith("LDG")]
    assert loads
    assert all("STRONG.GPU" in name for name in loads)


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [(1, 11008, 4096), (16, 4096, 4096), (1, 1024, 4096), (32, 4096, 11008), (8, 1000, 2048)],
)
def test_offered_where_it_fills_the_device(rows, columns, size):
    calls = offered(linear("bfloat16", rows, columns, size))
    assert 2 <= len(calls) <= 11  # each is compiled when it is measured
    for call in calls:
        tile = Tile(**call.parameters)
        parts = ceil(size / tile.terms(size, 2))
        assert parts == tile.parts
        assert ceil(columns / tile.columns) * parts >= 0.75 * 132
        assert why_unknown(call.choice) is None
        assert call.choice.kind == "template"


REFUSED = {
    "many rows": linear("bfloat16", 33, 4096, 4096),
    "fp64": linear("float64", 4, 4096, 4096),
    "AMD": linear("bfloat16", 4, 4096, 4096, arch="gfx942:AMD-Instinct-MI300X"),
    "nothing": linear("bfloat16", 0, 4096, 4096),
    "a small weight": linear("bfloat16", 4, 64, 64),
    "a weight with its columns side by side": changed(
        p := linear("bfloat16", 4, 4096, 1024),
        operands=(p.operands[0], changed(p.operands[1], stride=(1, 4096)), *p.operands[2:]),
    ),
    "terms that lie far apart": changed(
        p := linear("bfloat16", 4, 4096, 4096),
        operands=(changed(p.operands[0], stride=(1, 2**20)), *p.operands[1:]),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    assert not offered(REFUSED[name])


@pytest.mark.parametrize(("level", "alike"), [("sm_90", "sm_90"), ("sm_75", "sm_")])
def test_an_unknown_gpu_is_taken_for_a_small_one_of_its_level(level, alike):
    """Or of any, where none of its level is known."""
    calls = offered(linear("bfloat16", 16, 4096, 4096, arch=f"{level}:Nobody-knows"))
    rooms = [t.shared_memory for t in target.table() if t.arch.startswith(alike)]
    assert calls
    assert all(Tile(**c.parameters).shared(16, 2) <= min(rooms) for c in calls)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("unary", "binary"), [("gelu", "none"), ("gelu_tanh", "none"), ("relu", "add"), ("none", "mul")]
)
def test_the_epilogue_is_that_of_the_op(unary, binary, bias):
    """In fp64, so that only the order of the sums is another."""
    problem = linear("bfloat16", "3x2", 4096, 530, unary, binary, bias)
    wide = tuner.to_float64(problem)
    inputs = inputs_of(wide, torch.device("cpu"), seed=0)
    wanted = tuner.function_of(wide)(*inputs)
    assert {call.parameters["parts"] for call in offered(problem)} > {1}
    for call in offered(problem):
        result = tuner.function_of(wide, call.body)(*inputs)
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12, check_stride=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_rounded_once(dtype):
    """So it is no farther from fp64 than torch's, which rounds the product before its epilogue."""
    problem = linear(str(dtype).split(".")[1], 2, 4096, 515, "gelu")
    inputs = inputs_of(problem, torch.device("cpu"), seed=0)
    exact = tuner.function_of(tuner.to_float64(problem))(*(t.double() for t in inputs))
    usual = tuner.function_of(problem)(*inputs)
    for call in offered(problem):
        result = tuner.function_of(problem, call.body)(*inputs)
        assert result.dtype == dtype
        off, usually = ((t.double() - exact).abs().max() for t in (result, usual))
        assert off <= usually + torch.finfo(torch.float32).eps * exact.abs().max() * 8


def test_shapes_with_several_leading_dimensions():
    x, weight = torch.randn(2, 1, 3, 40), torch.randn(4096, 40)
    call = library.linear.skinny.CALLS[-1]
    result = call.body(x, weight, None, None, "none", "relu", [], False)
    torch.testing.assert_close(result, torch.relu(x @ weight.t()))


def test_records_may_name_it():
    problem = linear("bfloat16", 16, 4096, 4096)
    outcomes = tuple(timed(call.choice, 10.0) for call in library.calls(problem))
    assert why_refused(Record(problem, outcomes, PROVENANCE)) is None
    (call, *_) = offered(problem)
    other = changed(call.choice, parameters={**call.parameters, "columns": 48})
    assert "no columns=48" in why_unknown(other)


def test_inductor_knows_the_lowering_and_the_template():
    lowerings.register()
    from torch._inductor.lowering import lowerings as known

    assert torch.ops.ipex.few_rows.default in known
    for one_row in (True, False):
        assert inductor_source(one_row).count("{{store_output(") == 1
        template = library.linear.skinny._template(one_row, skinny.USUAL)
        assert template is library.linear.skinny._template(
            one_row, skinny.USUAL
        )  # a name is taken once


def test_a_weight_that_is_made_in_the_graph_is_laid_out_by_rows(tmp_path, monkeypatch, code_alone):
    """Inductor would lay it out as what it is made of, and the kernel reads whole rows."""
    calls = offered(linear("bfloat16", 16, 4096, 1024))
    call = next(c for c in calls if c.parameters["parts"] == 1)

    def function(x, turned):
        weight = (turned.t() * 2.0).contiguous()
        return call.body(x, weight, None, None, "none", "none", [], False)

    def inputs():
        make = functools.partial(torch.empty, device="cuda:0", dtype=torch.bfloat16)
        return [make(16, 1024), make(1024, 4096)]

    code = h200.code(function, inputs, tmp_path, monkeypatch)
    assert "empty_strided_cuda((4096, 1024), (1024, 1), torch.bfloat16)" in code


@pytest.mark.sampled("16-4-False", "2x3-2-True")
@pytest.mark.parametrize(
    ("rows", "parts", "joined"),
    [
        (1, 1, False),
        pytest.param(16, 1, False, marks=pytest.mark.slow),
        (16, 4, False),
        pytest.param(16, 2, True, marks=pytest.mark.slow),
        ("4x4", 1, False),
        ("2x3", 2, True),
    ],
)
def test_inductor_fuses_the_epilogue(rows, parts, joined, tmp_path, monkeypatch):
    """Into the only kernel, or into the one that adds up parts; for a GPU that is not here."""
    problem = linear("bfloat16", rows, 4096, 4096, "gelu")
    call = next(c for c in offered(problem) if is_such(c, parts, joined))
    code = h200.code_of_call(problem, call, tmp_path, monkeypatch)
    launched = re.findall(r"(triton_\w+)\.run\(", code)
    assert [name.split("_fused_")[0] for name in launched] == (
        ["triton_tem"] if parts == 1 or joined else ["triton_tem", "triton_poi"]
    )
    assert ["exp2" in name for name in launched] == [False] * (len(launched) - 1) + [True]
    assert "extern_kernels." not in code
    assert ("ws_ptr" in code) == joined


def is_such(call, parts, joined):
    return call.parameters["parts"] == parts and ("joined" in call.parameters) == joined


def test_the_memory_in_which_parts_meet_is_of_one_call(tmp_path, monkeypatch, code_alone):
    """So calls in two streams do not meet there; and nothing is launched to set it up."""
    problem = linear("bfloat16", 16, 4096, 4096)
    call = next(c for c in offered(problem) if is_such(c, 2, True))

    def function(x, first, second):
        between = call.body(x, first, None, None, "none", "relu", [], False)
        return call.body(between, second, None, None, "none", "none", [], False)

    def inputs():
        make = functools.partial(torch.empty, device="cuda:0", dtype=torch.bfloat16)
        return [make(16, 4096), make(4096, 4096), make(4096, 4096)]

    code = h200.code(function, inputs, tmp_path, monkeypatch)
    size = Tile(**call.parameters).workspace(16, 4096)
    before, within = code.split("def call(", 1)
    assert "workspace" not in before
    assert re.search(rf"workspace_\w+ = empty_strided_cuda\(\({size}, \)", within)
    assert len(re.findall(r"\.run\(.*\bworkspace_\w+", within)) == 2
    assert "zero" not in within
    assert "fill" not in within
