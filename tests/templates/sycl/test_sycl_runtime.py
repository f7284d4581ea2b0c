"""SYCL on the CPU: kernels compiled in a child, kept, loaded, launched; what is missing is said."""

import ctypes
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ipex_inductor.aot_cache import default_store, kernels, log_once, toolkit
from ipex_inductor.aot_cache import entry as entries
from ipex_inductor.aot_cache.survey import survey
from ipex_inductor.errors import (
    ArgumentError,
    DeviceError,
    SyclAbsentError,
    SyclCompileError,
    SyclDeviceError,
)
from ipex_inductor.target.device import find_target, xe
from ipex_inductor.templates.sycl import binaries, device, shim, source, wheels, worker
from ipex_inductor.templates.sycl.source import Entry, Source
from support.sycl_device import DEEP, ENDLESS, HEAD, axpy, needs_sycl

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One for this file, so that SYCL's functions are compiled once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def at_home(home, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(home))


@pytest.fixture
def cpu():
    """The device as a new process has it: nothing is loaded."""
    return device.CpuDevice()


def one(body, name="f", **more):
    """A source of one kernel on one pointer."""
    return Source(f"{HEAD}\nKERNEL {name}(float* x) {{ {body} }}\n", (Entry(name, ("*",)),), **more)


def run(module, size):
    x, y = torch.randn(size), torch.randn(size)
    expected = y.double() + 2.5 * x.double()
    module.kernel("axpy")((2.5, x, y, size), (-(-size // 64) * 64,), (64,))
    # A product and a sum, fused or not: an ulp of what is added.
    bound = torch.finfo(torch.float32).eps * (x.abs() * 2.5 + y.abs() + 1)
    assert ((y - expected).abs() <= bound).all()


def kinds():
    return sorted(e.key["kind"] for e in survey(default_store.store().folder) if e.key)


# Sources and keys


@pytest.mark.parametrize("word", source.BANNED)
def test_what_is_known_to_crash_or_to_be_slow_is_refused(word):
    with pytest.raises(ArgumentError, match="a source without"):
        one(f"/* {word} */")


def test_kinds_of_arguments_and_aspects_are_checked():
    with pytest.raises(ArgumentError, match="fp16"):
        Entry("f", ("*", "fp16"))
    with pytest.raises(ArgumentError, match="tensor cores"):
        one("", needs=("tensor cores",))


def test_a_manifest_says_how_to_launch():
    made = axpy(needs=("fp64",))
    assert made.manifest["needs"] == ["fp64"]
    assert made.manifest["entries"] == [
        {"name": "axpy", "arguments": ["fp32", "*", "*", "i64"], "dims": 1, "sub_group": 0}
    ]


@pytest.fixture
def installed(monkeypatch):
    def install(version, soname="libsycl.so.9"):
        here = wheels.Runtime(version, Path("/nowhere/lib", soname), None)
        monkeypatch.setattr(wheels, "runtime", lambda: here)
        return here

    install("2026.0.0")
    return install


def test_a_key_names_all_that_code_depends_on(installed, monkeypatch):
    first = axpy()
    others = [
        replace(first, text=first.text + "\n"),
        replace(first, options=("-ffp-contract=off",)),
        replace(first, native=("-ze-opt-large-register-file",)),
        replace(first, problem=(("template", "other"),)),
    ]
    keys = [binaries.spirv_key(s) for s in (first, *others)]
    keys += [binaries.native_key(s, "xe:20.1", "1.6") for s in (first, *others)]
    keys.append(binaries.native_key(first, "xe:12.60", "1.6"))
    keys.append(binaries.native_key(first, "xe:20.1", "1.7"))
    installed("2026.1.0")
    keys.append(binaries.spirv_key(first))
    monkeypatch.setenv("CL_CONFIG_CPU_TARGET_ARCH", "sapphirerapids")
    keys.append(binaries.spirv_key(first))
    assert len({key.digest for key in keys}) == len(keys)
    assert keys[0].architecture == "spirv"
    assert keys[0].kind == "spirv"
    monkeypatch.setenv("CXX", "another")  # which has no part in it
    assert binaries.spirv_key(first) == keys[-1]


def test_sycls_number_of_an_architecture_is_read():
    # sycl::ext::oneapi::experimental::architecture::intel_gpu_pvc and intel_gpu_bmg_g21
    assert xe(0x00000003_0F000700) == find_target("max-1100").arch == "xe:12.60"
    assert xe(0x00000005_00400000) == find_target("b580").arch == "xe:20.1"


# What is missing


@pytest.fixture
def nothing_loaded(monkeypatch):
    """As if no SYCL were in this process yet."""
    forget = shim._shim.cache_clear, wheels.runtime.cache_clear
    for each in forget:
        each()
    yield
    for each in forget:
        each()


def line_of(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_no_package(nothing_loaded, monkeypatch):
    def missing(name):
        raise wheels.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(wheels.metadata, "distribution", missing)
    with pytest.raises(SyclAbsentError) as error:
        shim.shim()
    assert line_of(error) == (
        "expected the package intel-sycl-rt; got none installed. "
        'pip install "ipex-inductor[sycl-cpu]", or [sycl] for Intel GPUs alone.'
    )


def test_another_sycl_in_the_process(nothing_loaded, installed, monkeypatch):
    monkeypatch.setattr(
        wheels, "list_mapped_files", lambda prefix: iter([Path("/torch/libsycl.so.8.0.1")])
    )
    with pytest.raises(SyclAbsentError) as error:
        shim.shim()
    assert line_of(error) == (
        "expected one SYCL; got /torch/libsycl.so.8.0.1 in this process (torch's), and "
        "libsycl.so.9 of intel-sycl-rt 2026.0.0 installed. "
        'pip install "intel-sycl-rt==2025.3.*"'
    )


def test_a_libsycl_that_does_not_load(nothing_loaded, installed, monkeypatch):
    monkeypatch.setattr(shim, "_blobs", lambda here: [b""])
    with pytest.raises(SyclAbsentError) as error:
        shim.shim()
    assert "libsycl.so.9 of intel-sycl-rt 2026.0.0 to load; got /nowhere/lib" in line_of(error)
    assert "pip install --force-reinstall intel-sycl-rt==2026.0.0" in line_of(error)


def test_no_compiler_for_the_shim(nothing_loaded, installed, monkeypatch):
    monkeypatch.setattr(toolkit.compat, "cxx", lambda: (None, "/nowhere/g++"))
    with pytest.raises(SyclAbsentError) as error:
        shim.shim()
    assert line_of(error) == (
        "expected a C++ compiler, as no cache has SYCL's functions; got none. "
        "`apt-get install g++`, or set CXX: it is needed once."
    )


def test_a_compiler_that_refuses_the_headers(nothing_loaded, installed, monkeypatch):
    """`installed` has none; the whole of what was said is the log."""
    with pytest.raises(SyclAbsentError) as error:
        shim.shim()
    assert "fatal error: sycl/sycl.hpp: No such file" in line_of(error)
    assert "#include <sycl/sycl.hpp>" in error.value.log


def test_what_failed_once_is_not_tried_again(nothing_loaded, installed, monkeypatch):
    asked = []
    monkeypatch.setattr(shim, "_blobs", lambda here: asked.append(here) or [b""])
    for _ in range(3):
        with pytest.raises(SyclAbsentError):
            shim.shim()
    assert len(asked) == 1


@needs_sycl
def test_without_a_compiler_a_cache_has_the_shim(nothing_loaded, monkeypatch):
    shim.shim()
    shim._shim.cache_clear()
    monkeypatch.setattr(toolkit.compat, "cxx", lambda: (None, "/nowhere/g++"))
    assert shim.shim().devices


@needs_sycl
def test_a_shim_by_another_compiler_is_as_good(nothing_loaded, monkeypatch):
    """Which a bundle has; one that does not load here is built."""
    key, entry = shim.cache_entry()
    shim._shim.cache_clear()
    built = []
    monkeypatch.setattr(toolkit, "compiler_identity", lambda: "another g++")
    monkeypatch.setattr(
        shim, "_build_library", lambda *_: built.append(1) or (entry.meta, entry.blob)
    )
    default_store.store().put(key, entry.meta, entry.blob)
    assert shim.shim().devices
    assert not built
    shim._shim.cache_clear()
    broken = entries.Entry(entry.meta, entry.blob[:64])
    monkeypatch.setattr(kernels, "by_any_compiler", lambda key: iter([broken]))
    assert shim.shim().devices
    assert built


@needs_sycl
def test_no_device_of_the_cpu(monkeypatch):
    monkeypatch.setattr(shim.shim(), "devices", [])
    with pytest.raises(SyclAbsentError) as error:
        device.CpuDevice()
    assert line_of(error) == (
        "expected SYCL's CPU device; got no device. "
        'pip install "ipex-inductor[sycl-cpu]", which brings intel-opencl-rt.'
    )


def test_other_devices_have_no_sycl():
    with pytest.raises(DeviceError, match="an Intel GPU; got cuda"):
        device.device_of(torch.device("cuda"))


# Compiling and loading


@needs_sycl
def test_compiled_kept_and_loaded_again(cpu):
    """Native code first, then SPIR-V, then the source."""
    made = axpy(problem=(("test", "loading"),))
    before = kinds()
    module = cpu.load(made)
    assert (module.origin, cpu.load(made)) == ("source", module)
    assert sorted([*before, "spirv", "sycl-native"]) == kinds()
    again = device.CpuDevice().load(made)
    assert again.origin == "native"
    native = binaries.native_key(made, cpu.arch, cpu.driver)
    (default_store.store().folder.path / f"{native.digest}.entry").unlink()
    third = device.CpuDevice().load(made)
    assert third.origin == "SPIR-V"
    assert device.CpuDevice().load(made).origin == "native"  # which that has left
    for each in (module, again, third):
        for size in (1, 63, 64, 1000, 70001):
            run(each, size)


@needs_sycl
def test_the_compiler_is_never_mapped_here(cpu):
    cpu.load(axpy())
    assert not [*wheels.list_mapped_files("libsycl-jit")]
    assert [*wheels.list_mapped_files("libsycl.so")]


@needs_sycl
def test_native_code_that_the_driver_refuses_is_made_anew(cpu, caplog):
    made = axpy(problem=(("test", "refused"),))
    cpu.load(made)
    log_once.say.cache_clear()
    binaries.keep_native(made, cpu.arch, cpu.driver, b"of another driver")
    with caplog.at_level(logging.WARNING, "ipex_inductor"):
        again = device.CpuDevice().load(made)
    assert again.origin == "SPIR-V"
    run(again, 100)
    (line,) = caplog.messages
    assert "native code of axpy is not used: OpenCL takes no such program: error -42" in line


@needs_sycl
def test_native_code_that_the_driver_compiles_again_is_said(cpu, caplog, monkeypatch):
    """A driver of GPUs does that without a word but in its log, where the code is another GPU's."""
    made = axpy(problem=(("test", "again"),))
    cpu.load(made)
    load = shim.shim().load
    log_once.say.cache_clear()
    kept = []
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "ipex_inductor"):
        patch.setattr(binaries, "keep_native", lambda *given: kept.append(given))
        patch.setattr(shim.shim(), "load", lambda *a: (load(*a)[0], "rebuilt from SPIR-V\n\nagain"))
        run(device.CpuDevice().load(made), 10)
    (line,) = caplog.messages
    assert f"axpy is not {cpu.arch}'s to its driver: rebuilt from SPIR-V" in line
    assert "again" not in line
    ((*which, code),) = kept  # what the driver made is what is loaded next time
    assert which == [made, cpu.arch, cpu.driver]
    assert code[:4] == b"\x7fELF"


@needs_sycl
def test_gpus_take_native_code_by_any_compiler(cpu):
    """ocloc's, of which a driver knows no version."""
    made = axpy(problem=(("test", "any"),))
    binaries.keep_native(made, "xe:20.1", "ocloc 26.27", b"code")
    (found,) = binaries.stored_native(made, "xe:20.1", "1.6.3")
    assert (found.blob, found.meta) == (b"code", made.manifest)
    assert not [*binaries.stored_native(made, "xe:12.60", "1.6.3")]


@needs_sycl
def test_what_the_compiler_says_is_the_reason(cpu):
    with pytest.raises(SyclCompileError) as error:
        cpu.load(one("x[0] = not_declared;"))
    assert "error: use of undeclared identifier 'not_declared'" in line_of(error)
    assert "^~" in error.value.log


@needs_sycl
def test_a_crash_of_the_compiler_costs_the_kernel_alone(cpu):
    with pytest.raises(SyclCompileError) as error:
        cpu.load(DEEP)
    said = "expected code of f; got an end of the compiler by SIGSEGV. The process was its own."
    assert line_of(error) == said
    run(cpu.load(axpy()), 10)


@needs_sycl
def test_a_compiler_that_does_not_end_is_ended(cpu, monkeypatch):
    monkeypatch.setattr(worker, "compile_source", partial(worker.compile_source, patience=3.0))
    with pytest.raises(SyclCompileError) as error:
        cpu.load(ENDLESS)
    assert line_of(error) == "expected code of f; got none after 3 seconds. It was ended."
    run(cpu.load(axpy()), 10)


# Launching


@needs_sycl
def test_every_kind_of_argument_arrives(cpu):
    text = f"""{HEAD}
KERNEL f(double* y, int a, long b, float c, double d) {{
  y[0] = a; y[1] = b; y[2] = c; y[3] = d;
}}
"""
    kernel = cpu.load(Source(text, (Entry("f", ("*", "i32", "i64", "fp32", "fp64")),))).kernel("f")
    given = (-(2**31), 2**62, 0.5, 1e-300)
    for pointer in (lambda y: y, lambda y: y.data_ptr()):
        y = torch.zeros(4, dtype=torch.float64)
        kernel((pointer(y), *given), (1,), (1,))
        assert y.tolist() == [float(value) for value in given]


@needs_sycl
def test_ranges_of_two_dimensions_have_the_fastest_last(cpu):
    text = (
        HEAD.replace("nd_range_kernel<1>", "nd_range_kernel<2>")
        + """
KERNEL f(int* y, int width) {
  auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  int at = item.get_global_id(0) * width + item.get_global_id(1);
  y[at] = item.get_group(0) * 10 + item.get_group(1);
}
"""
    )
    kernel = cpu.load(Source(text, (Entry("f", ("*", "i32"), dims=2),))).kernel("f")
    y = torch.zeros(4, 6, dtype=torch.int32)
    kernel((y, 6), (4, 6), (2, 3))
    expected = torch.tensor([[0, 1], [10, 11]]).repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert torch.equal(y, expected.int())


@needs_sycl
def test_launches_run_in_order_and_are_waited_for_once(cpu):
    kernel = cpu.load(axpy()).kernel("axpy")
    x, y = torch.ones(1 << 16), torch.zeros(1 << 16)
    for _ in range(50):
        kernel.enqueue((1.0, x, y, x.numel()), (x.numel(),), (64,))
    cpu.wait()
    assert torch.equal(y, torch.full_like(y, 50.0))


@needs_sycl
def test_what_the_device_refuses_is_an_error(cpu):
    kernel = cpu.load(axpy()).kernel("axpy")
    with pytest.raises(SyclDeviceError) as error:
        kernel((1.0, 0, 0, 0), (1 << 24,), (1 << 24,))  # more than a group may have
    assert "expected axpy to run on" in line_of(error)
    with pytest.raises(ValueError, match="zip"):
        kernel((1.0,), (64,), (64,))
    with pytest.raises(SyclDeviceError, match="OpenCL finds no kernel __sycl_kernel_none"):
        cpu.load(axpy()).kernel("none")


@needs_sycl
def test_a_source_that_needs_more_than_the_device_has(cpu):
    cpu.facts = {**cpu.facts, "fp64": False}
    with pytest.raises(SyclDeviceError) as error:
        cpu.load(axpy(needs=("fp16", "fp64")))
    assert f"expected a device with fp16, fp64; got {cpu.name} without fp64." in line_of(error)


@needs_sycl
def test_launches_go_to_the_current_stream_of_torch(monkeypatch):
    """A GPU's, played by the CPU: queues of others are wrapped, once each, and not waited for."""
    streams = [shim.shim().queue(device.CpuDevice().number) for _ in range(2)]
    now = [streams[0]]
    monkeypatch.setattr(torch._C, "_xpu_getCurrentRawStream", lambda _: now[0], raising=False)
    gpu = device.XpuDevice(0)
    assert gpu.facts["type"] == "cpu"
    kernel = gpu.load(axpy(problem=(("test", "streams"),))).kernel("axpy")
    x, y = torch.ones(1000), torch.zeros(1000)
    for now[0] in streams * 2:
        kernel((1.0, x, y, 1000), (1024,), (64,))
        gpu.wait()
    assert torch.equal(y, torch.full_like(y, 4.0))
    assert gpu._queues.keys() == {*streams}
    assert not {*gpu._queues.values()} & {*streams}


@needs_sycl
def test_the_users_list_of_drivers_stays_as_it_was(nothing_loaded, monkeypatch):
    """OpenCL reads it once a process, and others may read it after us."""
    monkeypatch.setenv("OCL_ICD_FILENAMES", "/nowhere.so")
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    assert shim.shim().devices
    assert libc.getenv(b"OCL_ICD_FILENAMES") == b"/nowhere.so"
