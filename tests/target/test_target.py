"""Targets: the table against the vendors' arithmetic, and what torch tells of a device."""

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipex_inductor.errors import DeviceError, TargetError
from ipex_inductor.target.device import (
    Target,
    _complete,
    _cpu_arch,
    _cuda,
    _xpu,
    as_cpu,
    current,
    find_target,
    first_of,
    table,
)

pytestmark = pytest.mark.unit

# Dense operations per clock and multiprocessor (an FMA is two), from the vendors' architecture
# documents; the GeForce of sm_89 accumulates in fp32 at half its rate.
AMPERE_ADA = {"bf16": 1024, "fp8": 2048, "tf32": 512, "fp32": 256, "fp64": 4, "int8": 2048}
HPG_XE2 = {"bf16": 2048, "fp32": 256, "int8": 4096}
OPERATIONS = {
    "sm_80": {"bf16": 2048, "tf32": 1024, "fp32": 128, "fp64": 128, "int8": 4096},
    "sm_86": AMPERE_ADA,
    "sm_89": AMPERE_ADA,
    "rtx-4090": AMPERE_ADA | {"bf16": 512, "fp8": 1024, "tf32": 256},
    "sm_90": {"bf16": 4096, "fp8": 8192, "tf32": 2048, "fp32": 256, "fp64": 256, "int8": 8192},
    "sm_100": {"bf16": 8192, "fp8": 16384, "tf32": 4096, "fp32": 256, "fp64": 128, "int8": 16384},
    "sm_120": AMPERE_ADA | {"bf16": 512, "fp8": 1024, "tf32": 256},
    "gfx90a": {"bf16": 1024, "fp32": 256, "fp64": 256, "int8": 1024},
    "gfx942": {"bf16": 2048, "fp8": 4096, "tf32": 1024, "fp32": 256, "fp64": 256, "int8": 4096},
    "gfx950": {"bf16": 4096, "fp8": 8192, "fp32": 256, "fp64": 128, "int8": 8192},
    "xe:12.60": {"bf16": 4096, "tf32": 2048, "fp32": 256, "fp64": 256, "int8": 8192},
    "xe:12.55": HPG_XE2,
    "xe:12.74": HPG_XE2,
    "xe:20.1": HPG_XE2,
    "xe:20.4": HPG_XE2,
}
# GHz under the vendor's rates: of the matrix unit, and of fp32 and fp64 where that differs.
CLOCKS = {
    "a10": (1.695, 1.695),
    "a100-40gb": (1.41, 1.41),
    "a100-80gb": (1.41, 1.41),
    "l4": (2.04, 2.04),
    "l40s": (2.52, 2.52),
    "rtx-4090": (2.52, 2.52),
    "h100": (1.83, 1.98),
    "h100-pcie": (1.62, 1.755),
    "h200": (1.83, 1.98),
    "h100-nvl": (1.545, 1.785),
    "h200-nvl": (1.545, 1.785),
    "gh200": (1.83, 1.98),
    "gh200-144gb": (1.83, 1.98),
    "h800": (1.83, 1.98),
    "b200": (1.86, 1.98),
    "rtx-5090": (2.407, 2.407),
    "mi250x": (1.7, 1.7),
    "mi300x": (2.1, 2.1),
    "mi355x": (2.4, 2.4),
    "max-1550": (1.6, 1.6),
    "max-1100": (1.55, 1.55),
    "a770": (2.0, 2.1),
    "b580": (2.85, 2.67),
    "arc-140v": (2.05, 2.05),
    "arc-140t": (2.35, 2.35),
}


@pytest.mark.parametrize("alias", CLOCKS)
def test_rates_are_clock_times_multiprocessors_times_operations(alias):
    target = find_target(alias)
    operations = OPERATIONS.get(alias) or OPERATIONS[target.arch]
    matrix, vector = CLOCKS[alias]
    for dtype, rate in target.rates:
        clock = vector if dtype in ("fp32", "fp64") else matrix
        per_clock = operations["bf16" if dtype == "fp16" else dtype]
        # Datasheets print two or three digits, and halve figures that were rounded up.
        assert rate == pytest.approx(clock * 1e9 * target.multiprocessors * per_clock, rel=0.015)


def test_every_row_with_rates_is_checked_above():
    assert {str(find_target(alias)) for alias in CLOCKS} == {str(t) for t in table() if t.rates}


@pytest.mark.parametrize("target", table(), ids=str)
def test_row_is_complete_and_sane(target):
    integrated = target.arch in ("xe:12.74", "xe:20.4", "xe:30.0")
    assert target.kind in ("cuda", "hip", "xpu")
    assert target.source
    assert target.subgroup == {"cuda": 32, "hip": 64}.get(target.kind, target.subgroup)
    assert target.subgroup in (8, 16, 32, 64)
    assert 8 <= target.multiprocessors <= 320
    assert 64 << 10 <= target.shared_memory <= 228 << 10
    assert target.registers in (65536, 131072) or target.arch == "xe:30.0"
    assert integrated or 12 << 30 <= target.memory <= 288 << 30
    assert integrated or 3e11 <= target.bandwidth <= 8e12
    if target.rates:
        assert target.rate("fp16") == target.rate("bf16")
        assert target.rate("bf16") < target.rate("int8") or target.arch == "gfx90a"


def test_described_values():
    h200 = find_target("h200")
    assert (h200.name, h200.arch, h200.kind) == ("NVIDIA H200", "sm_90", "cuda")
    assert (h200.multiprocessors, h200.shared_memory, h200.registers) == (132, 232448, 65536)
    assert (h200.bandwidth, h200.rate("bf16"), h200.rate("fp4")) == (4.8e12, 989.4e12, None)
    facts = "132 multiprocessors, 227 KiB shared memory, 141 GiB, 4800 GB/s, 989.4 Top/s bf16"
    assert h200.describe().startswith(f"NVIDIA H200 (sm_90): {facts}, ")
    assert find_target("mi300x").kind == "hip"
    assert find_target("b580").kind == "xpu"


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("H200", "sm_90:NVIDIA-H200"),
        ("nvidia h200", "sm_90:NVIDIA-H200"),
        ("SM_90:nvidia-h200", "sm_90:NVIDIA-H200"),
        ("rtx4090", "sm_89:NVIDIA-GeForce-RTX-4090"),
        ("Intel(R) Arc(TM) B580 Graphics", "xe:20.1:Intel-Arc-B580-Graphics"),
        ("xe:20.4:Intel-Arc-Graphics", "xe:20.4:Intel-Arc-Graphics"),
        ("x86-64:AVX2", "x86-64:avx2:any"),
        ("x86-64:avx512_bf16:any", "x86-64:avx512_bf16:any"),
    ],
)
def test_described_spellings(spelling, expected):
    assert str(find_target(spelling)) == expected


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("sm_90", "h100"), ("SM_80", "a100-40gb"), ("gfx942", "mi300x"), ("xe:20.1", "b580")],
)
def test_an_architecture_stands_for_the_first_of_it(arch, expected):
    assert first_of(arch) is find_target(expected)


@pytest.mark.parametrize("name", ["h200", "sm_90:NVIDIA-H200", "x86-64:avx2", "sm_75", ""])
def test_nothing_else_stands_for_another(name):
    assert first_of(name) is None


def test_a_cpu_may_be_taken_for_another():
    arch = current().arch
    with as_cpu("x86-64:avx2"):
        assert (current().arch, current().kind) == ("x86-64:avx2", "cpu")
    assert current().arch == arch


@given(target=st.sampled_from(table()), upper=st.booleans())
def test_described_reads_back_str(target, upper):
    assert find_target(str(target).upper() if upper else str(target)) is target


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("h20", "Nearest: h200,"),
        ("mi300", "Nearest: mi300x,"),
        ("H100 80GB", "h100"),
        ("sm_70:Tesla-V100", "Nearest: "),
        # Two architectures share this name: neither is taken silently.
        ("Intel(R) Arc(TM) Graphics", "xe:20.4:Intel-Arc-Graphics, xe:12.74:Intel-Arc-Graphics."),
    ],
)
def test_unknown_or_ambiguous_name_lists_the_nearest(name, nearest):
    with pytest.raises(TargetError) as error:
        find_target(name)
    assert nearest in error.value.todo
    assert repr(name) == error.value.came


def test_targets_are_values():
    assert len({*table(), *table(), find_target("h200")}) == len(table())
    assert find_target("h200") != find_target("h100")
    with pytest.raises(AttributeError):
        find_target("h200").arch = "sm_100"


def test_current_cpu_agrees_with_the_kernel():
    cpu = current("cpu")
    assert cpu == current(torch.device("cpu"))
    assert (cpu.kind, cpu.bandwidth, cpu.rates, cpu.memory) == ("cpu", None, (), None)
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("reads an x86-64 Linux's /proc/cpuinfo")
    facts = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = set(facts["flags"].split())
    levels = {"amx": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2"}
    best = next((f":{level}" for level, flag in levels.items() if flag in flags), "")
    assert cpu.arch == f"x86-64{best}"
    assert cpu.name == facts["model name"]
    assert 1 <= cpu.multiprocessors <= cpuinfo.read_text().count("processor\t")


@pytest.mark.parametrize(
    ("machine", "level", "features", "arch"),
    [
        ("x86_64", "AVX512", {"avx512_bf16": True, "amx_bf16": True}, "x86-64:amx"),
        ("x86_64", "AVX512", {"avx512_bf16": True, "amx_bf16": False}, "x86-64:avx512_bf16"),
        ("x86_64", "AVX512", {}, "x86-64:avx512"),
        # ATEN_CPU_CAPABILITY=avx2 on a CPU with more
        ("x86_64", "AVX2", {"avx512_bf16": True, "amx_bf16": True}, "x86-64:avx2"),
        ("AMD64", "NO AVX", {}, "x86-64"),
        ("x86_64", "DEFAULT", {}, "x86-64"),
        ("aarch64", "SVE256", {"sve": True}, "aarch64:sve256"),
        ("arm64", "DEFAULT", {}, "aarch64"),
    ],
)
def test_cpu_arch(machine, level, features, arch):
    assert _cpu_arch(machine, level, features) == arch


def cuda_properties(**changed):
    """What torch.cuda shows of an H200."""
    return SimpleNamespace(
        **{
            "name": "NVIDIA H200",
            "gcnArchName": "NVIDIA H200",
            "major": 9,
            "minor": 0,
            "multi_processor_count": 132,
            "shared_memory_per_block": 49152,
            "shared_memory_per_block_optin": 232448,
            "regs_per_multiprocessor": 65536,
            "warp_size": 32,
            "total_memory": 150_109_880_320,
        }
        | changed
    )


def xpu_properties(**changed):
    """What torch.xpu shows of one stack of a Max 1550."""
    return SimpleNamespace(
        **{
            "name": "Intel(R) Data Center GPU Max 1550",
            "architecture": 0x030F0007 << 8,
            "gpu_subslice_count": 64,
            "local_mem_size": 131072,
            "sub_group_sizes": [16, 32],
            "total_memory": 65520 << 20,
        }
        | changed
    )


def test_known_gpu_is_its_row_with_the_memory_it_has():
    h200, stack = _complete(_cuda(cuda_properties())), _complete(_xpu(xpu_properties()))
    assert (h200.memory, h200.rates) == (150_109_880_320, find_target("h200").rates)
    assert (stack.memory, stack.rates) == (65520 << 20, find_target("max-1550").rates)
    for measured, row in ((_cuda(cuda_properties()), "h200"), (_xpu(xpu_properties()), "max-1550")):
        assert measured.memory == pytest.approx(find_target(row).memory, rel=0.02)
        assert measured.shared_memory == find_target(row).shared_memory
        assert measured.subgroup == find_target(row).subgroup


@pytest.mark.parametrize(
    "measured",
    [
        _cuda(
            cuda_properties(
                name="AMD Instinct MI300X",
                gcnArchName="gfx942:sramecc+:xnack-",
                multi_processor_count=38,
                shared_memory_per_block=65536,
                regs_per_multiprocessor=65536,
                warp_size=64,
            )
        ),
        _xpu(xpu_properties(gpu_subslice_count=56)),
    ],
    ids=str,
)
def test_partition_has_its_architectures_registers_but_no_rates(measured):
    partition = _complete(measured)
    assert (partition.registers, partition.bandwidth, partition.rates) == (131072, None, ())
    assert partition.multiprocessors == measured.multiprocessors


def test_gpu_of_an_unknown_architecture_is_what_torch_says():
    unknown = _complete(_cuda(cuda_properties(name="NVIDIA Future", major=12, minor=1)))
    assert str(unknown) == "sm_121:NVIDIA-Future"
    assert (unknown.shared_memory, unknown.registers, unknown.rates) == (232448, 65536, ())
    assert unknown.source == Target("", "", 1).source


@pytest.mark.parametrize(
    ("architecture", "arch"),
    [
        (0x030DC008, "xe:12.55"),
        (0x030F0007, "xe:12.60"),
        (0x03128004, "xe:12.74"),
        (0x05004000, "xe:20.1"),
        (0x05010004, "xe:20.4"),
        (0x07800004, "xe:30.0"),
    ],
)
def test_xe_arch_is_the_ip_version(architecture, arch):
    assert _xpu(xpu_properties(architecture=architecture << 8)).arch == arch


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99", "xpu:99"])
def test_absent_device_says_what_to_do(device):
    with pytest.raises(DeviceError) as error:
        current(device)
    assert error.value.came.startswith(device)
    assert "find_target()" in error.value.todo


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_current_gpu_agrees_with_its_row():
    measured = _cuda(torch.cuda.get_device_properties(0))
    target = current("cuda")
    assert target == _complete(measured) == current(torch.device("cuda", 0))
    assert (target.shared_memory, target.subgroup) == (measured.shared_memory, measured.subgroup)
    assert measured.registers in (None, target.registers)
    row = next((row for row in table() if str(row) == str(target)), None)
    if row and row.multiprocessors == target.multiprocessors:
        assert row.memory == pytest.approx(target.memory, rel=0.02)


def test_describing_needs_no_torch():
    code = (
        "import sys; from ipex_inductor.target.device import find_target; find_target('h200');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
