"""Templates rendered alone, without Inductor: with a bias, an addend and a relu behind them.

So they can be compiled for any GPU, and interpreted on a CPU. Run as a program it does the latter:
`TRITON_INTERPRET=1 python rendered_templates.py CASES`, see
`tests/templates/triton/test_conv_templates.py`.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jinja2

NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def modules():
    """The names of those in templates/ that have a Triton template of Inductor's."""
    import ipex_inductor.templates

    (folder,) = ipex_inductor.templates.__path__
    return {
        file.stem
        for file in Path(folder, "triton").glob("*.py")
        if "read_kernel_text(" in file.read_text()
    }


def source(template, constants, columns, epilogue=True):
    """A module with `kernel(*operands, BIAS, OTHER, OUT)`; the result has rows of `columns`."""
    biased = constants.get("BIASED", False)  # then the template adds it

    def def_kernel(*names):
        names = [name for name in names if name != "BIAS"]
        given = "".join(
            f"    {name}: tl.constexpr = {value}\n" for name, value in constants.items()
        )
        return (
            "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
            f"def kernel({', '.join(names)}, BIAS, OTHER, OUT):\n"
            f"    INDEX_DTYPE: tl.constexpr = tl.int32\n{given}"
        )

    def store_output(indices, value, mask, val_shape=None, indent_width=4):
        row, column = indices
        lines = [f"place = {column} + {columns} * ({row})", f"made = {value}"]
        if epilogue and not biased:
            lines += [
                f"bias = tl.load(BIAS + {column} + 0 * ({row}), mask={mask}, other=0.0)",
                "made = made + bias.to(tl.float32)",
            ]
        if epilogue:
            lines += [
                f"other = tl.load(OTHER + place, mask={mask}, other=0.0)",
                "made = made + other.to(tl.float32)",
                "made = tl.where(made < 0.0, 0.0, made)",  # which keeps NaN
            ]
        lines.append(f"tl.store(OUT + place, made, mask={mask})")
        return ("\n" + " " * indent_width).join(lines)

    env = jinja2.Environment(undefined=jinja2.StrictUndefined)
    hooks = {"def_kernel": def_kernel, "store_output": store_output}
    return env.from_string(template).render(**hooks, **constants)


def signature(operands, dtype, out=None):
    given = dict.fromkeys([*operands, "BIAS", "OTHER"], f"*{NAMES[dtype]}")
    return {**given, "OUT": f"*{NAMES[out or dtype]}"}


def stem(x, weight, case, stride, padding, dilation):
    from ipex_inductor.ops.conv.small_channel import runs, to_matrix
    from ipex_inductor.templates.triton import conv_small_channel

    last, tile, window = case["last"], conv_small_channel.Tile(*case["tile"]), weight.shape[2:]
    around = (window, stride, padding, last)
    constants = conv_small_channel.constants(len(x), x.shape[1:], len(weight), *around, tile)
    rows, columns = constants["PIXELS"], len(weight)
    blocks = -(-rows // tile.BLOCK_M), -(-columns // tile.BLOCK_N)
    return (
        conv_small_channel.SOURCE,
        constants,
        to_matrix(weight, runs(x.shape[1:], *around), last),
        blocks,
    )


def stem_pool(x, weight, case, stride, padding, dilation):
    from ipex_inductor.ops.conv.small_channel import runs, to_matrix
    from ipex_inductor.templates.triton import conv_small_channel_pool

    last, tile, window = case["last"], conv_small_channel_pool.Tile(*case["tile"]), weight.shape[2:]
    around, ptx = (window, stride, padding, last), x.device.type != "cpu"  # which is interpreted
    sizes = len(x), x.shape[1:], len(weight)
    constants = conv_small_channel_pool.constants(*sizes, *around, tile, biased=True, ptx=ptx)
    blocks = constants["BLOCKS"], -(-len(weight) // tile.BLOCK_N)
    matrix = to_matrix(weight, runs(x.shape[1:], *around), last)
    return conv_small_channel_pool.SOURCE, constants, matrix, blocks


def depthwise(x, weight, case, stride, padding, dilation):
    from ipex_inductor.ops.conv.depthwise import taps
    from ipex_inductor.templates.triton import conv_depthwise, conv_strips

    template = conv_strips if case.get("template") == "strips" else conv_depthwise
    tile, window = template.Tile(*case["tile"]), weight.shape[2:]
    around = (window, stride, padding, dilation)
    constants = template.constants(len(x), x.shape[1:], *around, tile)
    blocks = constants["BLOCKS"], -(-len(weight) // tile.BLOCK_N)
    return template.SOURCE, constants, taps(weight), blocks


def fprop(x, weight, case, stride, padding, dilation):
    from ipex_inductor.ops.conv.fprop import rows_of_weight
    from ipex_inductor.templates.triton import conv_fprop

    tile, window = conv_fprop.Tile(*case["tile"]), weight.shape[2:]
    around = (window, stride, padding, dilation)
    constants = conv_fprop.constants(len(x), x.shape[1:], len(weight), *around, tile)
    blocks = -(-constants["PIXELS"] // tile.BLOCK_M) * constants["BLOCKS_N"]
    return conv_fprop.SOURCE, constants, rows_of_weight(weight), (blocks,)


def boxes(x, weight, case, stride, padding, dilation):
    from ipex_inductor.ops.conv.fprop import rows_of_weight
    from ipex_inductor.templates.triton import conv_tma

    tile, window = conv_tma.Tile(*case["tile"]), weight.shape[2:]
    around = (window, stride, padding, dilation, tile, case.get("programs", 2))
    constants = conv_tma.constants(len(x), x.shape[1:], len(weight), *around)
    return conv_tma.SOURCE, constants, rows_of_weight(weight), (constants["PROGRAMS"],)


def grouped(x, weight, case, stride, padding, dilation):
    from ipex_inductor.templates.triton import conv_grouped

    tile, groups, window = conv_grouped.Tile(*case["tile"]), case["groups"], weight.shape[2:]
    around = (window, stride, padding, dilation)
    constants = conv_grouped.constants(len(x), x.shape[1:], len(weight), groups, *around, tile)
    factor = tile.blocks(weight.shape, groups).of_weight(weight)
    blocks = -(-constants["PIXELS"] // tile.BLOCK_M) * constants["BLOCKS_N"]
    return conv_grouped.SOURCE, constants, factor, (blocks,)


def streaming(x, weight, case, stride, padding, dilation):
    from ipex_inductor.templates.triton import weight_stationary

    tile, (columns, terms) = weight_stationary.Tile(*case["tile"]), weight.shape[:2]
    rows = x.numel() // terms
    few = case.get("programs", 2)  # so that a program has several blocks
    constants = weight_stationary.constants(rows, columns, terms, True, tile, few)
    return (
        weight_stationary.SOURCE,
        constants,
        weight.flatten(1).contiguous(),
        (constants["PROGRAMS"],),
    )


def persistently(x, weight, case, stride, padding, dilation):
    from ipex_inductor.templates.triton import persistent

    tile, (columns, terms) = persistent.Tile(*case["tile"]), weight.shape[:2]
    few = case.get("programs", 2)
    constants = persistent.constants(x.numel() // terms, columns, terms, True, tile, few)
    return persistent.SOURCE, constants, weight.flatten(1).contiguous(), (constants["PROGRAMS"],)


def pipelining(x, weight, case, stride, padding, dilation):
    from ipex_inductor.templates.triton import software_pipelined

    tile, (columns, terms) = software_pipelined.Tile(*case["tile"]), weight.shape[:2]
    constants = software_pipelined.constants(x.numel() // terms, columns, terms, True, tile)
    return (
        software_pipelined.SOURCE,
        constants,
        weight.flatten(1).contiguous(),
        (constants["PROGRAMS"],),
    )


def stem_weight(x, grad, case, stride, padding, dilation):
    from ipex_inductor.templates.triton import conv_small_channel_weight

    last, window = case["last"], case["weight"][2:]
    tile, steps = conv_small_channel_weight.Tile(*case["tile"]), case["steps"]
    around = (window, stride, padding, last)
    constants = conv_small_channel_weight.constants(
        len(x), x.shape[1:], case["weight"][0], *around, steps, tile
    )
    return (
        conv_small_channel_weight.SOURCE,
        constants,
        grad,
        (constants["PROGRAMS"], constants["BLOCKS"]),
    )


def shortcut(x, source, columns, case):
    """Text, constants and blocks, as the others; `source` is read in steps of the case's stride."""
    from ipex_inductor.templates.triton import conv_tma, weight_stationary
    from ipex_inductor.templates.triton import residual as shortcut

    boxed = case["kind"] == "boxes"
    tile = (conv_tma if boxed else weight_stationary).Tile(*case["tile"])
    sizes = len(x), x.shape[1:], source.shape[1:], columns, case["stride"]
    constants = shortcut.constants(*sizes, tile, case.get("programs", 2))
    return shortcut.BOXES if boxed else shortcut.STREAMED, constants, (constants["PROGRAMS"],)


# For each template: text, constants, the weight as it takes it, the grid.
READY = {"stem": stem, "depthwise": depthwise, "fprop": fprop, "boxes": boxes}
READY |= {"grouped": grouped, "strips": depthwise, "stem_weight": stem_weight}
READY |= {"stem_pool": stem_pool}
READY |= {"streamed": streaming, "persistent": persistently, "pipelined": pipelining}


def compiled(template, dtype, gpu, given, epilogue=True):
    """The stand-alone kernel by Triton, for a GPU that is not here."""
    text, constants, *_ = given
    columns = "OUT_C" if "OUT_C" in constants else "CHANNELS"
    rendered = source(text, {**constants, "ALLOW_TF32": True}, constants[columns], epilogue)
    return binary(rendered, signature(("X", "W"), dtype), template, gpu)


def shortcut_compiled(kind, sizes, tile, dtype, gpu):
    """The same of a block's end: image, columns, image of the shortcut, its stride."""
    import torch

    image, columns, beside, *stride = sizes
    x, other = (torch.empty(size, device="meta") for size in (image, beside))
    case = {"kind": kind, "tile": [*vars(tile).values()], "stride": [*stride, 1][:1] * 2}
    text, constants, _ = shortcut(x, other, columns, case | {"programs": 132})
    rendered = source(text, {**constants, "ALLOW_TF32": True}, columns, epilogue=False)
    return binary(rendered, signature(("X", "W", "S", "P"), dtype), tile, gpu)


def binary(rendered, types, template, gpu, name="kernel", **constants):
    """What Triton makes of a module's kernel, whose tensors begin at multiples of 16 bytes.

    `template` is its tile, which has the warps and stages, or says nothing of stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ipex_inductor.target.device import find_target
    from ipex_inductor.templates.build.gpu import _module

    target = find_target(gpu)
    arch = int(target.arch[3:]) if target.kind == "cuda" else target.arch
    with triton.knobs.cache.scope():
        return triton.compile(
            ASTSource(
                _module(rendered)[name],
                types | dict.fromkeys(constants, "constexpr"),
                constexprs=constants,
                attrs={(n,): [["tt.divisibility", 16]] for n in range(len(types))},
            ),
            target=GPUTarget(target.kind, arch, target.subgroup or 32),
            options={
                "num_warps": getattr(template, "warps", 0) or template.num_warps,
                "num_stages": getattr(template, "stages", 0) or getattr(template, "num_stages", 2),
            },
        )


def ready(kind, x, weight, tile, stride, padding, dtype, dilation=(1, 1), groups=1):
    """As `READY` has it, of tensors without values."""
    import torch

    made = torch.empty(x, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    factor = torch.empty(weight, dtype=dtype, device="meta")
    given = {"last": True, "tile": [*vars(tile).values()], "groups": groups, "template": kind}
    return READY[kind](made, factor, given, stride, padding, dilation)


def usage(made):
    """Registers of a thread, and bytes that did not fit into them, as the binary says."""
    import triton

    if "amdgcn" in made.asm:
        said = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count): +(\d+)", made.asm["amdgcn"]))
        return int(said["vgpr_count"]), int(said["vgpr_spill_count"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    return int(said["REG"]), int(said["STACK"]) + int(said["LOCAL"])


BINARIES = {"cuda": "cubin", "hip": "hsaco"}
PTXAS = 16  # bytes that it keeps for itself on sm_100, of no register


def within_limits(made, gpu, spills=0):
    """It is machine code, whose registers and shared memory a multiprocessor has; as it says."""
    from ipex_inductor.target.device import find_target

    target = find_target(gpu)
    registers, spilled = usage(made)
    assert made.asm[BINARIES[target.kind]].startswith(b"\x7fELF")
    assert spilled <= max(spills, PTXAS * (target.arch == "sm_100")), f"{spilled} bytes spilled"
    most = min(255 if target.kind == "cuda" else 512, target.registers)  # of a thread
    threads = made.metadata.num_warps * target.subgroup
    assert registers <= min(most, target.registers // threads), f"{registers} registers"
    assert made.metadata.shared <= target.shared_memory, f"{made.metadata.shared} bytes shared"


def error(case, device="cpu"):
    """The largest error, in parts of the largest exact value; where it is not finite agrees."""
    import torch

    from ipex_inductor.templates.build.gpu import _module

    dtype = getattr(torch, case["dtype"])
    torch.manual_seed(0)
    x, weight = (torch.randn(case[name]).to(device, dtype) for name in ("x", "weight"))
    if case["last"]:
        x = x.to(memory_format=torch.channels_last)
    if case.get("planted") is not None:
        x.as_strided([x.numel()], [1])[case["planted"]] = float("inf")
        weight = weight.abs() + 1  # so that infinities do not cancel, nor meet zeros
    if case.get("moved"):  # by one element, so that nothing is aligned
        memory = torch.empty(x.numel() + 1, dtype=dtype, device=device)
        x = memory.as_strided(x.shape, x.stride(), 1).copy_(x)
    window = {name: case[name] for name in ("stride", "padding", "dilation")}
    exact = torch.conv2d(x.double(), weight.double(), None, **window, groups=case["groups"])
    bias = torch.randn(len(weight)).to(device, dtype)
    exact = exact + bias.double().view(-1, 1, 1)
    if case["template"] == "stem_pool":
        exact = torch.max_pool2d(torch.relu(exact), 3, 2, 1)
    wanted = exact.permute(0, 2, 3, 1).reshape(-1, weight.shape[0])
    other = torch.randn(wanted.shape).to(device, dtype)
    wanted = torch.relu(wanted + other.double())
    text, constants, factor, blocks = READY[case["template"]](x, weight, case, **window)
    out = torch.full(wanted.shape, float("nan"), dtype=dtype, device=device)
    kernel = _module(source(text, {**constants, "ALLOW_TF32": False}, out.shape[1]))["kernel"]
    options = {}  # as the lowerings have them
    if device != "cpu":  # for what describes a tensor to the copy engine
        import triton

        options = {"num_warps": case["warps"], "num_stages": constants.get("STAGES", 2)}
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    kernel[blocks](x, factor, bias, other, out, **options)
    if not out.numel():
        return 0.0
    finite = wanted.isfinite()
    assert torch.equal(finite, out.isfinite()), "other elements are not finite"
    off = (out.double() - wanted)[finite].abs().max() / wanted[finite].abs().max()
    return float(off)


def error_of_shortcut(case, device="cpu"):
    """The same of two products that are added."""
    import torch

    from ipex_inductor.templates.build.gpu import _module

    dtype = getattr(torch, case["dtype"])
    torch.manual_seed(0)
    x, beside, weight, projection = (
        torch.randn(case[name]).to(device, dtype) for name in ("x", "source", "weight", "other")
    )
    x, beside = (t.to(memory_format=torch.channels_last) for t in (x, beside))
    if case.get("planted") is not None:  # in what is read, and in what the stride leaves out
        beside.as_strided([beside.numel()], [1])[case["planted"]] = float("inf")
        projection = projection.abs() + 1
    wide = [t.double() for t in (x, weight, beside, projection)]
    exact = torch.conv2d(*wide[:2]) + torch.conv2d(*wide[2:], None, case["stride"])
    wanted = exact.permute(0, 2, 3, 1).reshape(-1, weight.shape[0])
    bias = torch.randn(weight.shape[0]).to(device, dtype)
    wanted = torch.relu(wanted + bias.double())
    text, constants, blocks = shortcut(x, beside, weight.shape[0], case)
    out = torch.full(wanted.shape, float("nan"), dtype=dtype, device=device)
    given = {**constants, "ALLOW_TF32": False}
    kernel = _module(source(text, given, out.shape[1]))["kernel"]
    warps = {} if device == "cpu" else {"num_warps": case["warps"]}
    if device != "cpu":
        import triton

        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    factors = weight.flatten(1).contiguous(), beside, projection.flatten(1).contiguous()
    kernel[blocks](x, *factors, bias, torch.zeros_like(out), out, **warps)
    finite = wanted.isfinite()
    assert torch.equal(finite, out.isfinite()), "other elements are not finite"
    off = (out.double() - wanted)[finite].abs().max() / wanted[finite].abs().max()
    return float(off)


def error_of_weight(case, device="cpu"):
    """The same of a weight's gradient: parts into memory full of NaN, added up."""
    import torch

    from ipex_inductor.ops.conv.conv_weight import ALONE
    from ipex_inductor.ops.conv.geometry import sides
    from ipex_inductor.ops.conv.small_channel import from_matrix, runs
    from ipex_inductor.templates.build.gpu import _module

    dtype, weight = getattr(torch, case["dtype"]), case["weight"]
    around = {name: case[name] for name in ("stride", "padding")}
    torch.manual_seed(0)
    x = torch.randn(case["x"]).to(device, dtype)
    size = sides(x.shape[2:], weight[2:], *around.values())
    grad = torch.randn(len(x), weight[0], *size).to(device, dtype)
    grad = grad.to(memory_format=torch.channels_last)
    if case["last"]:
        x = x.to(memory_format=torch.channels_last)
    beside = torch.ones(x.shape, dtype=torch.bool)
    for place in case.get("beside", ()):  # which no window reads
        x[tuple(place)], beside[tuple(place)] = float(case["planted"]), False
    if case.get("moved"):
        memory = torch.empty(x.numel() + 1, dtype=dtype, device=device)
        x = memory.as_strided(x.shape, x.stride(), 1).copy_(x)
    empty = torch.empty(weight, dtype=torch.float64, device=device)
    wide = torch.where(beside.to(device), x, 0.0).double()
    window = (case["stride"], case["padding"], case["dilation"], False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward
    wanted = backward(grad.double(), wide, empty, None, *window, ALONE)[1]
    text, constants, _, blocks = stem_weight(x, grad, case, **around, dilation=None)
    terms = constants["TERMS"]
    out = torch.full((constants["PROGRAMS"], weight[0], terms), float("nan"), device=device)
    made = source(text, {**constants, "ALLOW_TF32": False}, terms, epilogue=False)
    warps = {} if device == "cpu" else {"num_warps": case["warps"]}
    _module(made)["kernel"][blocks](grad, x, grad, grad, out, **warps)
    found = runs(x.shape[1:], weight[2:], *around.values(), case["last"])
    result = from_matrix(out.double().sum(0).t(), found, weight[1], weight[2:], case["last"])
    assert result.isfinite().all()
    return float((result - wanted).abs().max() / wanted.abs().max())


ERRORS = {"stem_weight": error_of_weight, "shortcut": error_of_shortcut}


def main():
    """A line for each case: its number and error."""
    for number, case in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        print(number, ERRORS.get(case["template"], error)(case), flush=True)


if __name__ == "__main__":
    main()
