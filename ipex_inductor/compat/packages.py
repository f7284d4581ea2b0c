"""Graphs compiled ahead of time: exported, compiled to a library, and run from it."""

import ctypes
import inspect
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.compat.inductor import plain_decompositions
from ipex_inductor.compat.levels import compiles_for_levels


def export_model(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, torch.fx.GraphModule]:
    """Return torch.export's program of a model, and its graph with parameters as attributes."""
    program = torch.export.export(model, args, dict(kwargs), strict=False)
    parameters = inspect.signature(program.module).parameters
    guards = {"check_guards": False} if "check_guards" in parameters else {}
    module = program.module(**guards)
    module.meta["dynamo_compile_id"] = None  # so AOT autograd takes parameters for weights
    return program, module


def why_not_ahead() -> str:
    """Return what AOT autograd does around the graph that is being compiled, "" for nothing.

    A package contains the graph only.
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
    if any(isinstance(input_meta, SubclassCreationMeta) for input_meta in meta.subclass_inp_meta):
        return "it has tensor subclasses"
    return "it has side effects" if meta.tokens else ""


def compile_ahead(
    gm: Any, example_inputs: Any, level: str, on_gpu: bool, **kwargs: Any
) -> tuple[Path, list[str]]:
    """Compile an inner graph to a library; return it with the CPU features needed beyond `level`.

    Torch before 2.13 compiles for this CPU only, except graphs `on_gpu`, whose loops do not run on
    the host and whose kernels are in the library.

    Args:
        gm: the inner graph.
        example_inputs: its example inputs.
        level: a value of `-march`.
        on_gpu: whether the graph runs on a GPU.
        kwargs: the further arguments of Inductor's inner compiler.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.virtualized import V

    inductor: Any = config
    patches: dict[str, Any] = {"cpp_wrapper": True, "cpp.dynamic_threads": True}
    patches |= {"cpp_cache_precompile_headers": False}
    if shutil.which("openssl") is None:  # torch runs it to hash a precompiled header
        patches |= {"aot_inductor.precompile_headers": False}
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
        compiled: Any = compile_fx_inner(gm, example_inputs, **kwargs)
    return Path(getattr(compiled, "filename", compiled)), sorted(able)


def package_runner(library: Path, device: str) -> Any:
    """Return the runner of a library that `compile_ahead` made.

    Its `run` takes and returns lists of tensors.
    """
    aoti: Any = torch._C._aoti
    if device == "cpu":
        return aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)  # the library is not linked to it
    return aoti.AOTIModelContainerRunnerCuda(str(library), 1, device)
