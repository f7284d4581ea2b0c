"""SYCL kernels as lowerings of `ipex::sycl_*`: whether this machine has them, and as candidates.

To Inductor the operators are extern calls; `templates/sycl/calls.py` runs the kernels. On the CPU
an option selects them. On Intel GPUs they are candidates beside torch's oneDNN, with any
epilogue.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.aot_cache.digest import digest_fields
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.autotune.record import Choice, Problem
from ipex_inductor.errors import SyclAbsentError
from ipex_inductor.lowerings.common.calls import DTYPES, Call, is_channels_last
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.ops.gemm.linear import LinearArgs
from ipex_inductor.templates.sycl.kernel import DTYPES as WORDS
from ipex_inductor.templates.sycl.kernel import HEAD, part
from ipex_inductor.templates.sycl.source import Source as Source
from ipex_inductor.templates.sycl.tiles import ENGINES, blocks, tiles

PRODUCT, GROUPED = "ipex.sycl.product", "ipex.sycl.grouped"
TEXTS = {  # by template: source files that its digest covers
    PRODUCT: (
        *(*HEAD, "engine.cpp", "matrix.cpp", "lanes.cpp"),
        *("rows.cpp", "window.cpp", "product.cpp"),
    ),
    GROUPED: (*HEAD, "grouped.cpp"),
}


def describe_runtime() -> str:
    """Return a description of the SYCL runtime installed here."""
    from ipex_inductor.templates.sycl import wheels

    try:
        runtime = wheels.runtime()
    except SyclAbsentError:
        return "absent"
    return f"{runtime.key_name}, CPU device {runtime.cpu_version or 'absent'}"


def register() -> None:
    """Register the kernels as implementations of the operators."""
    from ipex_inductor.templates.sycl import calls

    calls.register()


def why_not(dtype: torch.dtype, gather: str, few: bool, binary: str, unary: str) -> str:
    """Return why no kernel is available on the CPU, or "".

    The kernel is compiled and loaded, unless it was before.

    Args:
        dtype: dtype of the operands.
        gather: "rows", "window", or "groups".
        few: whether the kernel is for one row.
        binary: binary op of the epilogue.
        unary: unary op of the epilogue.
    """
    reason = _why_not_on(torch.device("cpu"), dtype, gather, few, binary, unary)
    if reason and dtype in WORDS:  # The option requested it for this dtype.
        say(f"oneDNN is used instead of SYCL's CPU device: {reason}")
    return reason


def _why_not_on(
    device: torch.device,
    dtype: torch.dtype,
    gather: str,
    few: bool,
    binary: str,
    unary: str,
    block: str = "",
) -> str:
    from ipex_inductor.templates.sycl import calls
    from ipex_inductor.templates.sycl.product import Epilogue

    kernel = calls.kernel(device, dtype, gather, few, Epilogue(binary, unary), block)
    return kernel if isinstance(kernel, str) else ""


# Candidates on Intel GPUs.


def arch_of(problem: Problem) -> str:
    """Return the problem's architecture without the device's name, like `xe:20.1`."""
    return ":".join(problem.arch.split(":")[:2])


def source_for(problem: Problem, choice: Choice) -> Source:
    """Return the source of the SYCL kernel that `choice` runs for `problem`."""
    from ipex_inductor.templates.sycl import calls
    from ipex_inductor.templates.sycl.product import Epilogue

    dtype, block = WORDS[_dtype(problem)], str(choice.parameters["block"])
    epilogue = Epilogue(*_words(problem))
    return calls.source_of(arch_of(problem), dtype, _gather(problem), False, epilogue, block)[0]


def is_ours(choice: Choice) -> bool:
    """Return whether `choice` is a SYCL kernel."""
    return choice.name in TEXTS


def _dtype(problem: Problem) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, operands_by_name(problem)["x"].dtype)
    return dtype


def _words(problem: Problem) -> tuple[str, str]:
    return str(problem.constants["binary"]), str(problem.constants["unary"])


def _gather(problem: Problem) -> str:
    if problem.op != str(torch.ops.ipex.conv.default):
        return "rows"
    return "window" if problem.constants["groups"] == 1 else "groups"


def _pack(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    packed: Tensor = torch.ops.ipex.sycl_packed(weight, [], 1)
    return packed


def _pack_window(*args: Any) -> Tensor:
    call = ConvArgs(*args)
    packed: Tensor = torch.ops.ipex.sycl_packed(call.weight, call.dilation, call.groups)
    return packed


def _linear(block: str, packed: Tensor, *args: Any) -> Tensor:
    call = LinearArgs(*args)
    operands = call.x, packed, call.weight.shape[0], call.bias, call.other
    result: Tensor = torch.ops.ipex.sycl_linear(*operands, *call.epilogue(), block)
    return result


def _conv(block: str, packed: Tensor, *args: Any) -> Tensor:
    """Compute the convolution by a SYCL kernel; the result has the memory format of the activation.

    Args:
        block: block of the kernel; "" for a grouped convolution.
        packed: packed weight.
        args: arguments of `ipex::conv`; of the weight only the shape is used.
    """
    call = ConvArgs(*args)
    operands = call.x, packed, call.weight.shape[0], call.bias, call.other
    padding = [*call.padding] * 2 if len(call.padding) == 1 else call.padding  # "valid" is one zero
    window = [*call.weight.shape[2:]], call.stride, padding, call.dilation, call.groups
    last = compat.is_channels_last(call.x)
    result: Tensor = torch.ops.ipex.sycl_conv(*operands, *window, *call.epilogue(), last, block)
    return result


def _why_not(block: str, problem: Problem) -> str | None:
    operands, arch = operands_by_name(problem), arch_of(problem)
    if arch not in ENGINES:
        return f"no kernel in SYCL is for {problem.arch}"
    dtypes = {operand.dtype for operand in operands.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPES:
        return f"no kernel in SYCL is for {', '.join(sorted(dtypes))}"
    sizes = [size for operand in operands.values() for size in operand.shape]
    if 0 in sizes:
        return "a size is zero"
    if not all(isinstance(size, int) for size in operands["weight"].shape):
        return "the sizes of its weight vary"
    if block and block not in [tile.block for tile in tiles(arch, WORDS[_dtype(problem)])]:
        return f"{arch} has no block of {block} in {dtypes.pop()}"
    return None


def _why_not_conv(block: str, problem: Problem) -> str | None:
    x, constants = operands_by_name(problem)["x"], problem.constants
    if constants["transposed"]:
        return "no kernel in SYCL is for transposed convolutions"
    if len(x.shape) != 4:
        return "it is not over a plane"
    if (constants["groups"] == 1) != bool(block):
        return "it is grouped" if block else "it is not grouped"
    lies = problem.symbols or is_channels_last(x) or x.stride[-1] == 1
    return (
        _why_not(block, problem)
        if lies
        else "its activation is not channels-last, and its rows are not contiguous"
    )


def _ready(block: str, problem: Problem, device: torch.device) -> str:
    """Return why the kernel is not available on `device`, or ""; it is compiled and loaded."""
    binary, unary = _words(problem)
    return _why_not_on(device, _dtype(problem), _gather(problem), False, binary, unary, block)


def _call(
    name: str,
    body: Callable[..., Tensor],
    why_not: Callable[[str, Problem], str | None],
    arrange: Callable[..., Tensor],
    block: str,
) -> Call:
    return Call(
        name,
        functools.partial(body, block),
        functools.partial(why_not, block),
        parameters={"block": block},
        version=digest_fields({"source": "".join(map(part, TEXTS[name]))})[:12],
        arrange=arrange,
        ready=functools.partial(_ready, block),
    )


LINEAR_CALLS = tuple(_call(PRODUCT, _linear, _why_not, _pack, block) for block in blocks())
CONV_CALLS = (
    *(_call(PRODUCT, _conv, _why_not_conv, _pack_window, block) for block in blocks()),
    _call(GROUPED, _conv, _why_not_conv, _pack_window, ""),
)
