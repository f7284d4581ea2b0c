"""Program that compiles Triton kernels to machine code of an absent GPU, for `other_tritons.py`.

    PYTHONPATH=TRITON PYTHON other_tritons_compile.py FOLDER < kernels

Each input line is a kernel; `N.cubin` in the folder is the N-th, and each gets an output line.
"""

import hashlib
import json
import re
import sys
import time
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_xe_compile import load_function


def compile_kernel(kernel, given):
    """Return a kernel's cubin and its launch parameters; pointers are multiples of 16 bytes."""
    pointers = [n for n, kind in enumerate(given["signature"].values()) if kind.startswith("*")]
    aligned = {(n,): [["tt.divisibility", 16]] for n in pointers}
    source = ASTSource(kernel, given["signature"], constexprs=given["constants"], attrs=aligned)
    options = {"num_warps": given["warps"], "num_stages": given["stages"]}
    made = triton.compile(source, GPUTarget("cuda", given["arch"], 32), options)
    entry = re.search(r"\.entry[^(]*\((.*?)\)", made.asm["ptx"], re.S)
    known = made.metadata
    return made.asm["cubin"], {
        "name": known.name,
        "shared": known.shared,
        "warps": known.num_warps,
        "parameters": len(re.findall(r"\.param", entry[1])),
        "scratch": known.global_scratch_size,
        "scratch_align": known.global_scratch_align,
    }


def main():
    """One after the other."""
    folder = Path(sys.argv[1])
    for number, line in enumerate(sys.stdin):
        given, begin = json.loads(line), time.perf_counter()
        try:
            kernel = load_function(given["text"], folder / f"kernel_{number}.py", given["function"])
            cubin, about = compile_kernel(kernel, given)
            (folder / f"{number}.cubin").write_bytes(cubin)
        except Exception as error:
            about = {"wrong": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        seconds = round(time.perf_counter() - begin, 1)
        about |= {"of": hashlib.sha256(line.strip().encode()).hexdigest()}
        print(json.dumps(about | {"seconds": seconds, "triton": triton.__version__}), flush=True)


if __name__ == "__main__":
    main()
