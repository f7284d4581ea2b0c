"""Graphs compiled ahead: exported, made a library, run from it."""

import ctypes
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.compat.inductor import plain_decompositions
from ipex_inductor.compat.levels import compiles_for_levels


def exported(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, torch.fx.GraphModule]:
    """What torch.export makes of a model, and its graph, whose parameters are attributes."""
    program = torch.export.export(model, args, dict(kwargs), strict=False)
    known = inspect.signature(program.module).parameters
    guards = {"check_guards": False} if "check_guards" in known else {}
    module = program.module(**guards)
    module.meta["dynamo_compile_id"] = None  # so AOT autograd takes parameters for weights
    return program, module


def why_not_ahead() -> str:
    """What AOT autograd does around the graph that is compiled now, "" if that is nothing.

    Only the graph itself is in a package.
    """
    from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    meta = context.fw_metadata if context else None
    assert meta is not None
    inside = OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view
    if any(info.mutates_data or info.mutates_metadata for info in meta.input_info):
        return "it writes to inputs or buffers"
    if any(info.output_type not in inside for info in meta.output_info):
        return "it returns its inputs, or views of them or of one another"
    if any(isinstance(each, SubclassCreationMeta) for each in meta.subclass_inp_meta):
        return "it has tensor subclasses"
    return "it has side effects" if meta.tokens else ""


def compile_ahead(
    gm: Any, example_inputs: Any, level: str, on_gpu: bool, **kwargs: Any
) -> tuple[Path, list[str]]:
    """Compile an inner graph to a library, and what that needs of a CPU beyond `level`.

    `level` is a value of `-march`; what torch before 2.13 compiles is for the CPU here alone, but
    for graphs `on_gpu`, whose loops are none of the host's and whose kernels are in the library.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.virtualized import V

    inductor: Any = config
    patches: dict[str, Any] = {"cpp_wrapper": True, "cpp.dynamic_threads": True}
    patches |= {"cpp_cache_precompile_headers": False}
    patches |= {"aot_inductor.metadata": {}}  # torch writes to it, for good
    able = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    if on_gpu:
        patches |= {"triton.autotune_at_compile_time": True, "triton.store_cubin": True}
        patches |= {"aot_inductor.embed_kernel_binary": True, "cpp.simdlen": 1}
        able = set()
    elif level and compiles_for_levels():
        patches["cpp.march"] = level
        able &= set(str(pick_vec_isa()).lower().split())
    kwargs = plain_decompositions(kwargs) | {"cpp_wrapper": True, "aot_mode": True}
    with inductor.patch(patches), V.set_aot_compilation(True):
        found: Any = compile_fx_inner(gm, example_inputs, **kwargs)
    return Path(getattr(found, "filename", found)), sorted(able)


def package_runner(library: Path, device: str) -> Any:
    """What runs a library that `compile_ahead` made; its `run` takes and gives lists of tensors."""
    aoti: Any = torch._C._aoti
    if device == "cpu":
        return aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)  # which it was linked without
    return aoti.AOTIModelContainerRunnerCuda(str(library), 1, device)
