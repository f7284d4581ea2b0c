"""Compile our Triton templates to native code of absent Intel GPUs, and check it statically.

    PATH=$PATH:FOLDER python -m benchmarks triton_xe --triton PYTHON [--arch pvc ...] [--write]

PYTHON has triton-xpu and needs no torch, FOLDER has ocloc: `make triton-xe` makes both and runs
this. torch's XPU builds bring a newer Triton than the one that can be installed by itself. The
check is that of `sycl_aot.py`, with 256 registers a thread where 128 spill, as Intel's Triton
requests them. Nothing runs, so there are no speeds. `--write` saves the table to
benchmarks/results/triton_xe.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # templates rendered alone
from ipex_inductor.errors import SyclError
from ipex_inductor.lowerings.common.templated import XE_ENGINES, XE_PRODUCTS
from ipex_inductor.target import device as target
from ipex_inductor.templates.sycl import ocloc, zebin
from ipex_inductor.templates.sycl.tiles import NAMES
from ipex_inductor.templates.triton import (
    conv_depthwise,
    conv_fprop,
    conv_grouped,
    conv_small_channel,
    skinny,
)
from support.rendered_templates import READY, signature, source

RESULTS = Path(__file__).parents[1] / "results" / "triton_xe.jsonl"
COMPILE = Path(__file__).parents[1] / "common" / "triton_xe_compile.py"
LARGE = "-cl-intel-256-GRF-per-thread"
DTYPES = ("bfloat16", "float16", "float32")
# For each template: tiles, then problems as image, weight, stride, padding, groups.
CONVS = {
    "stem": (
        conv_small_channel.XE_TILES,
        [
            ([32, 3, 224, 224], [64, 3, 7, 7], 2, 3, 1),
            ([32, 3, 224, 224], [32, 3, 3, 3], 2, 1, 1),
            ([32, 3, 224, 224], [16, 3, 3, 3], 2, 1, 1),
        ],
    ),
    "depthwise": (
        conv_depthwise.XE_TILES,
        [
            ([32, 128, 56, 56], [128, 1, 7, 7], 1, 3, 128),
            ([32, 96, 112, 112], [96, 1, 3, 3], 2, 1, 96),
        ],
    ),
    "fprop": (
        conv_fprop.XE_TILES,
        [
            ([32, 64, 56, 56], [256, 64, 1, 1], 1, 0, 1),
            ([32, 64, 56, 56], [64, 64, 3, 3], 1, 1, 1),
            ([32, 128, 28, 28], [32, 128, 3, 3], 1, 1, 1),
            ([32, 32, 56, 56], [64, 32, 3, 3], 1, 1, 1),
        ],
    ),
    "grouped": (
        conv_grouped.XE_TILES,
        [
            ([32, 576, 14, 14], [576, 24, 3, 3], 1, 1, 24),
            ([32, 128, 56, 56], [128, 4, 3, 3], 1, 1, 32),
        ],
    ),
}
ROWS = (1, 16)


def fits(kind, tile, image, weight, stride, padding, groups):
    """Return whether the tile is a candidate for the problem."""
    if kind == "stem":
        around = [stride] * 2, [padding] * 2
        found = conv_small_channel.runs(image[1:], weight[2:], *around, True)
        return conv_small_channel.fits(tile, weight[0], found, conv_small_channel.XE_WIDEST)
    if kind == "fprop":
        return conv_fprop.fits(tile, image[1], weight[0])
    return kind != "grouped" or conv_grouped.fits(tile, weight, groups)


def conv_kernels(dtype):
    """Yield kernels of convolutions with bias, addend and relu."""
    kind_of = getattr(torch, dtype)
    for name, (tiles, problems) in CONVS.items():
        for (image, weight, stride, padding, groups), tile in product(problems, tiles):
            problem = (image, weight, stride, padding, groups)
            if (name != "depthwise" and dtype not in XE_PRODUCTS) or not fits(name, tile, *problem):
                continue
            x = torch.empty(image, dtype=kind_of, device="meta")
            x = x.to(memory_format=torch.channels_last)
            factor = torch.empty(weight, dtype=kind_of, device="meta")
            case = {"last": True, "tile": [*vars(tile).values()], "groups": groups}
            around = [stride] * 2, [padding] * 2, [1, 1]
            text, constants, _, _ = READY[name](x, factor, case, *around)
            rendered = source(text, {**constants, "ALLOW_TF32": False}, weight[0])
            yield {
                "name": f"{name} {'x'.join(map(str, vars(tile).values()))}",
                "problem": f"{dtype} {image[1]} to {weight[0]}, {weight[2]}x{weight[3]}",
                "text": rendered,
                "signature": signature(("X", "W"), dtype),
                "constants": {},
                "pointers": 5,
                "warps": tile.num_warps,
                "stages": getattr(tile, "num_stages", 2),
                "promised": name != "depthwise",
            }


def linear_kernels(dtype):
    """Yield kernels of skinny linear layers."""
    for rows in ROWS:
        for tile in skinny.ONE_ROW if rows == 1 else skinny.ROWS:
            if tile in skinny.NOT_XE or (rows > 1 and dtype not in XE_PRODUCTS):
                continue
            itemsize = getattr(torch, dtype).itemsize
            sizes = {"M": rows, "N": 4096, "K": 4096}
            strides = {"x_stride": 4096, "x_step": 1, "weight_stride": 4096}
            constants = sizes | strides | tile.parameters(rows, 4096, itemsize)
            short = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
            tensors = {"x": short, "weight": short, "y": "*fp32"}
            yield {
                "name": f"few_rows {'x'.join(str(int(n)) for n in tile[:5])}",
                "problem": f"{dtype} {rows} x 4096 to 4096",
                "text": skinny.source(rows == 1).replace("def product(", "def kernel("),
                "signature": tensors | dict.fromkeys(constants, "constexpr"),
                "constants": constants,
                "pointers": 3,
                "warps": tile.warps,
                "stages": tile.stages,
                "promised": rows > 1,
            }


def describe_device(arch):
    """Return the properties that Intel's Triton queries of a GPU, from Intel's compiler."""
    narrow = arch.removeprefix("xe:") not in XE_ENGINES  # nor has it loads of blocks
    return {
        "sub_group_sizes": [8, 16, 32] if narrow else [16, 32],
        "has_subgroup_matrix_multiply_accumulate": True,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": not narrow,
        "has_subgroup_2d_block_io": not narrow,
        "has_bfloat16_conversions": True,
    }


def native_code(spirv, arch):
    """Return the code and its registers a thread: 128 or, if those spill, 256."""
    for options in ((), (LARGE,)):
        asked = SimpleNamespace(native=options, named="Triton")
        code = ocloc.native(asked, spirv, arch)
        (found,) = zebin.facts(code)
        if not found.spilled:
            break
    return found


def check_kernel(name, kernel, made, folder, number):
    """Return the row of one kernel on one architecture."""
    about = {"arch": name, "template": kernel["name"], "problem": kernel["problem"]}
    if "wrong" in made:
        return about | made
    begin = time.perf_counter()
    try:
        found = native_code((folder / f"{number}.spv").read_bytes(), NAMES[name])
    except (SyclError, ValueError) as error:
        return about | made | {"wrong": str(error).splitlines()[0]}
    known = next(t for t in target.table() if t.arch == NAMES[name])
    wrong = found.wrong(known, kernel["promised"])
    if made["shared"] > known.shared_memory:
        wrong = wrong or f"needs {made['shared']} bytes of local memory"
    seconds = {"native_s": round(time.perf_counter() - begin, 1)}
    facts = asdict(found) | {"local": made["shared"], "kernel": kernel["name"]}
    return about | facts | {"wrong": wrong, "spirv_s": made["spirv_s"]} | seconds


def format_row(found):
    """Return one line of the table."""
    facts = ("lanes", "registers", "local", "spilled", "private", "engine")
    figures = " ".join(f"{found.get(name, '-')!s:>7}" for name in facts)
    where = f"{found['arch']:4}{found['template']:24}{found['problem']:32}"
    return f"{where}{figures}  {found['wrong'] or 'ok'}"


def main():
    """All of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--triton", required=True, help="an interpreter that has triton-xpu")
    parser.add_argument("--arch", nargs="*", choices=[*NAMES], default=[*NAMES])
    parser.add_argument("--only", default="", help="templates with this in their name")
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    kernels = [k for dtype in given.dtype for k in (*conv_kernels(dtype), *linear_kernels(dtype))]
    kernels = [kernel for kernel in kernels if given.only in kernel["name"]]
    rows, triton = [], ""
    for name in given.arch:
        engine = NAMES[name].removeprefix("xe:") in XE_ENGINES
        here = [kernel for kernel in kernels if engine or not kernel["promised"]]
        lines = [json.dumps({**kernel, "device": describe_device(NAMES[name])}) for kernel in here]
        with tempfile.TemporaryDirectory() as path:
            command = [given.triton, str(COMPILE), path]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as child:
                child.stdin.write("\n".join(lines))
                child.stdin.close()
                for number, (kernel, line) in enumerate(zip(here, child.stdout, strict=True)):
                    made = json.loads(line)
                    triton = made.pop("triton")
                    rows.append(check_kernel(name, kernel, made, Path(path), number))
                    print(format_row(rows[-1]), flush=True)
    wrong = [found for found in rows if found["wrong"]]
    print(f"{len(rows)} kernels, {len(wrong)} refused by the gate")
    if given.write:
        command = "python -m benchmarks triton_xe --triton PYTHON --write"
        about = {"date": time.strftime("%Y-%m-%d"), "command": command, "triton-xpu": triton}
        about |= {"compiler": ocloc.compiler_name(), "torch": version("torch")}
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in (about, *rows)))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
