"""Program that compiles Triton kernels to SPIR-V for Intel GPUs, for `triton_xe.py`.

    PYTHON triton_xe_compile.py FOLDER < kernels

PYTHON has `triton-xpu`, and needs neither torch nor a GPU. Each input line is a kernel; `N.spv` in
the folder is the N-th, and each gets an output line.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def skip_device_probe():
    """Skip the probe that Intel's Triton compiles for a GPU of this machine."""
    if "intel" not in backends:
        sys.exit(f"triton {triton.__version__} cannot compile for Intel's GPUs: give triton-xpu")
    nothing = SimpleNamespace(parse_device_arch=lambda _: "")
    made = backends["intel"].compiler.__init__.__globals__
    made["compile_module_from_src"] = lambda *_, **__: nothing


def load_function(text, file, name="kernel"):
    """Load the function of that name from a file, as Triton reads its source text."""
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def compile_kernel(kernel, given):
    """Return a kernel's SPIR-V and its metadata."""
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(given["pointers"])}
    source = ASTSource(kernel, given["signature"], constexprs=given["constants"], attrs=aligned)
    options = {"num_warps": given["warps"], "num_stages": given["stages"]}
    made = triton.compile(source, GPUTarget("xpu", given["device"], 32), options)
    about = {"lanes": made.metadata.threads_per_warp, "shared": made.metadata.shared}
    return made.asm["spv"], about | {"engine": "matrix_mad" in made.asm["llir"]}


def main():
    """One after the other."""
    skip_device_probe()
    folder = Path(sys.argv[1])
    for number, line in enumerate(sys.stdin):
        given, begin = json.loads(line), time.perf_counter()
        try:
            kernel = load_function(given["text"], folder / f"kernel_{number}.py")
            spirv, about = compile_kernel(kernel, given)
            (folder / f"{number}.spv").write_bytes(spirv)
        except Exception as error:
            about = {"wrong": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        seconds = round(time.perf_counter() - begin, 1)
        print(json.dumps(about | {"spirv_s": seconds, "triton": triton.__version__}), flush=True)


if __name__ == "__main__":
    main()
