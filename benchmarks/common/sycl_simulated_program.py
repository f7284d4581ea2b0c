"""Program that sends SYCL kernels to a simulated Intel GPU, for `sycl_simulated.sh`."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ipex_inductor.target.device import xe
from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.sycl import binaries, device, shim, worker
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.step import step_source
from support.sycl_device import axpy

ADAMW = StepKernel(
    formula="AdamW",
    flags=("decoupled_weight_decay", "weight_decay"),
    param="bfloat16",
    rest="int16",
    grad="bfloat16",
    state=("float32", "float32"),
    counted="float32",
)


def main() -> None:
    """Load by all three ways, launch, and hand the driver code of another GPU."""
    # The child is to have the same C library.
    command = os.environ["IPEX_SIMULATED_LOADER"].split()
    worker.COMMAND = (*command, *worker.COMMAND[1:])
    devices = shim.shim().devices
    number = next(n for n, facts in enumerate(devices) if facts["type"] == "gpu")
    facts = devices[number]
    matrices = len(facts["matrices"]) if facts["matrix"] else "no"
    print(f"{facts['name']}, {xe(facts['architecture'])}, driver {facts['driver']}, ", end="")
    print(f"sub-groups {facts['sub_groups']}, {matrices} shapes of matrices")
    stream = shim.shim().queue(number)
    torch._C._xpu_getCurrentRawStream = lambda index: stream  # as torch's XPU build has it
    for source in (axpy(), step_source(ADAMW, counting=False)):
        show_launches(source)
    load_foreign_code(axpy(problem=(("test", "of another GPU"),)))


def show_launches(source: Source) -> None:
    """Launch a kernel from its source, from native code and from SPIR-V."""
    for wanted in ("source", "native", "SPIR-V"):
        gpu = device.XpuDevice(0)  # which knows nothing
        if wanted == "SPIR-V":
            key = binaries.native_key(source, gpu.arch, gpu.driver)
            (binaries.default_store.store().folder.path / f"{key.digest}.entry").unlink()
        began = time.perf_counter()
        module = gpu.load(source)
        kernels = [module.kernel(entry.name) for entry in source.entries]
        took = time.perf_counter() - began
        assert module.origin == wanted, module.origin
        print(f"{source.kernel_names}: from {module.origin} in {1e3 * took:.1f} ms")
    if source.kernel_names == "axpy":
        x, y = torch.ones(64), torch.ones(64)
        kernels[0]((2.0, x, y, 64), (64,), (64,))
        gpu.wait()
        print(f"axpy: launched and waited for; nothing computed it: {y[0]:g}")


def load_foreign_code(source: Source) -> None:
    """Load another GPU's code under this GPU's key: the driver recompiles it, with a warning."""
    gpu = device.XpuDevice(0)
    gpu.load(source)
    other = "dg2" if gpu.arch != "xe:12.55" else "pvc"
    spirv = binaries.stored_spirv(source, gpu.arch)
    assert spirv is not None
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.spv"), Path(folder, "made.bin")
        given.write_bytes(spirv.blob)
        command = f"{os.environ['IPEX_SIMULATED_OCLOC']} compile -spirv_input -file {given}"
        command += f" -device {other} -output {made} -output_no_suffix"
        subprocess.run(command.split(), check=True, capture_output=True)
        file = made if made.exists() else made.with_suffix(".bin.bin")
        binaries.keep_native(source, gpu.arch, gpu.driver, file.read_bytes())
    said = logging.StreamHandler(sys.stdout)
    logging.getLogger("ipex_inductor").addHandler(said)
    print(f"code of {other} is given:")
    for _ in range(2):  # the second time it is this GPU's
        module = device.XpuDevice(0).load(source)
        print(f"{source.kernel_names}: from {module.origin}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["IPEX_HOME"] = home
        main()
