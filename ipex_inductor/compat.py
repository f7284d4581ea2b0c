"""Every difference between the torch versions we support, and the only reader of the version."""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.errors import CompilerNotFoundError, UnsupportedTorchError

log = logging.getLogger(__name__)

VERSION = str(torch.__version__)
# Whose templates Inductor's are, as choices hold it: with another torch they are others.
TEMPLATES = f"torch {VERSION.split('+')[0]}"
OLDEST = (2, 11)
TESTED = {
    (2, 11): "whole suite",
    (2, 12): "smoke test",
    (2, 13): "whole suite, in CI",
    (2, 14): "smoke test",
    (2, 15): "whole suite",
}


def torch_minor(version: str = VERSION) -> tuple[int, int]:
    """The (major, minor) of a torch version string such as "2.13.0+cpu" or "2.16.0.dev2026"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def untested_reason(version: str = VERSION) -> str | None:
    """Why our passes must stay out of this torch, or None when it is tested.

    Raises `UnsupportedTorchError` for a torch too old to fall back on.
    """
    minor = torch_minor(version)
    if minor in TESTED:
        return None
    if minor < OLDEST:
        raise UnsupportedTorchError(
            f"torch >= {OLDEST[0]}.{OLDEST[1]}",
            f"torch {version}",
            'Install a supported one: pip install "torch>=2.11,<2.16".',
        )
    newest = ".".join(map(str, max(TESTED)))
    return f"torch {version} is newer than the newest tested one, {newest}"


@functools.cache
def inductor_option_types() -> Mapping[str, type | None]:
    """Every option Inductor knows with its type, None where any value will do.

    As torch.compile does, a type with parameters (`list[str]`, `X | None`) is not checked.
    """
    from torch._inductor import config

    def checkable(name: str) -> type | None:
        kind = config.get_type(name)  # type: ignore[attr-defined]  # a module made into a class
        return kind if isinstance(kind, type) and not hasattr(kind, "__origin__") else None

    return {name: checkable(name) for name in config.get_config_copy()}


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's option values for a `torch.compile` mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def plain_decompositions(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `inner_compile` with Inductor's own decomposition table.

    From 2.13 on `compile_fx` hands a reduced table down to the inner compiler, where it makes
    FxGraphCache give up ("unpicklable type"). By then our joint pass has decomposed everything.
    """
    from torch._inductor.decomposition import select_decomp_table

    if "get_decomp_fn" in kwargs:
        kwargs["get_decomp_fn"] = select_decomp_table
    return kwargs


# Options that name passes of users; not every version has all.
USERS_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def compile_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """Inductor's inner compiler with its graph cache on, also below a bundled autograd cache.

    But for a graph without a call, for which Inductor then returns a bare function that a bundle
    cannot hold.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx_inner

    bundled = functorch_config.bundled_autograd_cache
    calls = any(node.op == "call_function" for node in gm.graph.nodes)
    with functorch_config.patch(bundled_autograd_cache=bundled and not calls):
        return compile_fx_inner(gm, example_inputs, **plain_decompositions(kwargs))


class _Lowered(BaseException):
    """Ends a compilation after lowering; no `except Exception` on the way takes it for a fault."""


def _stop(_: Any) -> Any:
    raise _Lowered


# Of `compile_fx` and `lower_inner` together: the scheduler calls this before it fuses anything.
LOWER_ONLY: dict[str, Any] = {"_pre_fusion_custom_pass": _stop}


def lower_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """`compile_inner` up to the lowering, under the options LOWER_ONLY; what comes back is no code.

    AOT autograd takes it for some, so that it goes on to the backward graph.
    """
    try:
        return compile_inner(gm, example_inputs, **kwargs)
    except _Lowered:
        return read_inner(gm, example_inputs)


def read_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """`compile_inner` that compiles nothing: what there was to learn, passes before it said."""

    def never(inputs: Any) -> Any:
        raise AssertionError("not compiled")

    never._boxed_call = True  # type: ignore[attr-defined]
    return never


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Backward graphs are compiled with their forward, and not when they are first needed."""
    from torch._functorch import config as functorch_config

    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        yield


@contextlib.contextmanager
def backward_too() -> Iterator[None]:
    """Backward graphs are compiled with their forward, under the keys of those that come later.

    The setting for it (see `backward_at_once`) is in AOT autograd's key, so it is set behind that.
    """
    from torch._functorch._aot_autograd import graph_compile
    from torch._functorch._aot_autograd.schemas import AOTConfig

    module: Any = graph_compile
    usual = module._aot_stage2b_bw_compile

    def at_once(*args: Any) -> Any:
        return usual(*(_not_lazy(a) if isinstance(a, AOTConfig) else a for a in args))

    module._aot_stage2b_bw_compile = at_once
    try:
        yield
    finally:
        module._aot_stage2b_bw_compile = usual


def _not_lazy(config: Any) -> Any:
    return dataclasses.replace(config, force_non_lazy_backward_lowering=True)


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


def compiles_for_levels() -> bool:
    """Whether Inductor takes a value of `-march`; else its C++ is for the CPU here alone."""
    from torch._inductor import config

    return hasattr(config.cpp, "march")


def package_runner(library: Path, device: str) -> Any:
    """What runs a library that `compile_ahead` made; its `run` takes and gives lists of tensors."""
    aoti: Any = torch._C._aoti
    if device == "cpu":
        return aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)  # which it was linked without
    return aoti.AOTIModelContainerRunnerCuda(str(library), 1, device)


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


def reload_graph(graph: Any, constants: Any) -> Any:
    """A `CompiledFxGraph` that came out of a cache, made callable again (None if it cannot be)."""
    from torch._inductor.codecache import FxGraphCache

    loaded, _ = FxGraphCache.cache_hit_post_compile(graph, {}, constants)
    return loaded


def unanalysed() -> contextlib.AbstractContextManager[Any]:
    """What is called inside goes past AOT autograd's check of custom ops, if that is what is on.

    A graph's first call is under it, each op at the price of some Python. For torch's ops and ours.
    """
    from torch.utils import _python_dispatch as dispatch

    mode = type(dispatch._get_current_dispatch_mode()).__name__
    if mode != "_AnalyzeCustomOpInputOutputMode":
        return contextlib.nullcontext()
    popped: contextlib.AbstractContextManager[Any] = dispatch._pop_mode_temporarily()
    return popped


@functools.cache
def name_system() -> None:
    """Have Inductor name this system, for the process, without hashing Triton where that is lost.

    That takes 0.3 s, and without a CUDA or ROCm device 2.13 and 2.14 drop it. The name is the same.
    """
    from torch._inductor import codecache

    if torch_minor() in ((2, 13), (2, 14)) and not torch.cuda.is_available():
        module: Any = codecache
        hashing, module.triton_key = module.triton_key, lambda: None
        try:
            codecache.CacheBase.get_system()
        finally:
            module.triton_key = hashing


Answers = Callable[[], MutableMapping[str, bool]]
_compiling: list[tuple[Path, Answers]] = []  # in the order begun; the last one is in force
_outside: dict[str, Any] = {}  # what was there before the first of them
_compiling_lock = threading.Lock()


def named_folder() -> str | None:
    """The folder that the user named for Inductor's files, by environment or around this call.

    Importing Dynamo writes torch's own default into the environment; that is nobody's wish.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    with _compiling_lock:
        named = _outside["folder"] if _compiling else os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is None or os.path.abspath(named) == os.path.abspath(default_cache_dir()):
        return None
    return named


@contextlib.contextmanager
def cache_folder(path: Path, answers: Answers) -> Iterator[None]:
    """Inductor's and Triton's files go to `path` meanwhile, those of compile workers too.

    By the environment: it is what torch reads anew each time and hands to its workers with each
    task. A Triton folder that the user named stays. C++ kernels that other compilations have loaded
    are not seen, nor do they see ours, or neither folder would be complete. Whether compiler and
    CPU can do AVX2, AVX-512, AMX ... is answered from `answers`; Inductor would build and load a
    library for each in every process. What is not answered is tried, and becomes an answer.
    """
    compilation = path, answers
    with _compiling_lock:
        if not _compiling:
            _remember()
        _compiling.append(compilation)
        _switch()
    try:
        yield
    finally:
        with _compiling_lock:
            _compiling.remove(compilation)
            _switch()


_loaded: dict[Any, dict[Any, Any]] = {}  # C++ kernels loaded inside `cache_folder`, as Inductor's


def _remember() -> None:
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpu_vec_isa import VecISA

    _outside["loaded"] = {kind: vars(kind)["cache"] for kind in _kinds(CppCodeCache)}
    for kind in _outside["loaded"]:
        kind.cache = _loaded.setdefault(kind, {})
    _outside["folder"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    _outside["triton"] = os.environ.get("TRITON_CACHE_DIR")
    _outside["check_build"] = tried = VecISA.check_build

    def check(isa: Any, code: str) -> bool:
        known = _compiling[-1][1]() if _compiling else {}
        question = f"{type(isa).__name__} {isa._arch_flags}\n{code}"
        if question not in known:
            known[question] = tried(isa, code)
        return known[question]

    vec_isa: Any = VecISA
    vec_isa.check_build = check


def _switch() -> None:
    """Point to the compilation begun last; leave all as it was where none goes on."""
    from torch._inductor.codecache import CacheBase
    from torch._inductor.cpu_vec_isa import VecISA
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    CacheBase.get_local_cache_path.cache_clear()  # it remembers the folder of its first call
    folder, triton = _outside["folder"], _outside["triton"]
    default = default_cache_dir()
    if _compiling:
        folder = str(_compiling[-1][0])
        if triton is None or Path(triton).is_relative_to(default):  # Inductor sets it for good
            triton = os.path.join(folder, "triton")
    else:
        vec_isa: Any = VecISA
        vec_isa.check_build = _outside["check_build"]
        for kind, cache in _outside["loaded"].items():
            kind.cache = cache
        used_triton = os.path.exists(os.environ.get("TRITON_CACHE_DIR", ""))
        if triton is None and used_triton and torch_minor() < (2, 15):
            # A worker keeps what the last task said until another says otherwise. So it is said,
            # as Inductor itself does as soon as it has a Triton kernel in this process.
            triton = os.path.join(folder or default, "triton", "0")
    named = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": triton}
    os.environ.update({name: value for name, value in named.items() if value is not None})
    if folder is None:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if triton is None:
        os.environ.pop("TRITON_CACHE_DIR", None)


def _kinds(kind: Any) -> Iterator[Any]:
    """A class and all below it that have a cache of their own."""
    if "cache" in vars(kind):
        yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def at_end_of_compile(call: Callable[[], None]) -> bool:
    """Do `call` once Dynamo or AOT autograd is done with the compilation that goes on now.

    AOT autograd saves a lazily compiled backward after it was compiled. False if none goes on that
    torch would tell the end of.
    """
    from torch._dynamo.callback import callback_handler

    pending = "_CompilationCallbackHandler__pending_callbacks_counter"
    if not getattr(callback_handler, pending, 0):
        return False
    _at_end.append(call)
    if _run_at_end not in callback_handler.end_callbacks:  # Dynamo's reset clears them
        callback_handler.register_end_callback(_run_at_end)
    return True


def around_next_compile(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Do `begin` when Dynamo next begins to trace something, and `end` once it is done with it.

    Nothing where Dynamo is not there yet: then nobody waits for it either.
    """
    dynamos = sys.modules.get("torch._dynamo.callback")
    if dynamos is None:
        return
    starts = dynamos.callback_handler.start_callbacks

    def begun(_: Any) -> None:
        begin()
        at_end_of_compile(ended)

    def ended() -> None:
        if begun in starts:  # and not earlier: torch goes through the list as `begun` is called
            starts.remove(begun)
        end()

    starts.append(begun)


_at_end: list[Callable[[], None]] = []


def _run_at_end(_: Any) -> None:
    while _at_end:
        _at_end.pop()()


def tensors_unprinted() -> None:
    """Until Dynamo is done with the compilation that goes on now, tensors print as their type.

    Up to 2.12 its guards by identity hold the text of each, which for a tensor of a GPU is a
    hundred numbers that the host waits for, one by one. Other threads print as ever.
    """
    torch_str: Any = torch._tensor_str
    printed, thread = torch_str._str, threading.get_ident()

    def brief(tensor: Any, **kwargs: Any) -> str:
        here = threading.get_ident() == thread
        return f"<{type(tensor).__name__}>" if here else printed(tensor, **kwargs)

    def restore() -> None:
        torch_str._str = printed

    if torch_minor() < (2, 13) and at_end_of_compile(restore):
        torch_str._str = brief


def inductor_changes() -> dict[str, Any]:
    """Inductor's options that are not as torch comes with, of those that Inductor digests."""
    from torch._inductor import config

    known: dict[str, Any] = config._config  # type: ignore[attr-defined]
    prefixes = ["_", *getattr(config, "_cache_config_ignore_prefix", [])]
    changes = config._get_dict(ignored_prefixes=prefixes, skip_default=True)  # type: ignore[attr-defined]
    # What was set and put back is among them.
    return {n: v for n, v in changes.items() if n not in _CACHES and v != known[n].default}


_CACHES = frozenset(  # whether caches are on changes no code
    {"autotune_local_cache", "bundled_autograd_cache", "force_disable_caches", "fx_graph_cache"}
    | {"fx_graph_remote_cache", "bundle_triton_into_fx_graph_cache"}
)


def caches_forbidden() -> bool:
    """Whether the user told Inductor to keep nothing at all."""
    from torch._inductor import config

    return bool(config.force_disable_caches)


def cxx() -> tuple[str | None, ...]:
    """The C++ compilers that Inductor tries, in order."""
    from torch._inductor import config

    named = config.cpp.cxx
    return tuple(named) if isinstance(named, (tuple, list)) else (named,)


def cxx_flags() -> tuple[str, ...]:
    """What g++ must be told for a source that uses torch's own C++."""
    root = Path(torch.__file__).parent
    # The loader finds the libraries by the names of those that this process has loaded.
    linked = f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"
    return "-std=c++20", f"-I{root / 'include'}", *linked


def without_torchs_own(variables: Mapping[str, Any]) -> dict[str, Any]:
    """These environment variables but for what torch itself says in them, on the way, for good.

    It names Triton the ptxas in its own wheel once it compiles; its version tells which that is.
    """
    ptxas = str(Path(torch.__file__).parent / "bin" / "ptxas")
    found = {name: os.path.realpath(str(v)) for name, v in variables.items() if "PTXAS" in name}
    own = {name for name, path in found.items() if path == os.path.realpath(ptxas)}
    return {name: value for name, value in variables.items() if name not in own}


def register_log() -> None:
    """Make `ipex` a short name of our log in `torch._logging.set_logs(modules={"ipex": level})`.

    TORCH_LOGS is parsed while torch is imported, before us, and takes a name it does not know for
    a module's: `TORCH_LOGS="+ipex_inductor"`.
    """
    from torch._logging._internal import register_log as register

    register("ipex", "ipex_inductor")


@contextlib.contextmanager
def graph_caches_off() -> Iterator[None]:
    """What is compiled inside runs all passes and leaves nothing in Inductor's graph caches."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    inductor: Any = config
    remote = {"fx_graph_remote_cache": False}
    before = _caches_off.set(True)
    try:
        with (
            inductor.patch(fx_graph_cache=False, **remote),
            functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        ):
            yield
    finally:
        _caches_off.reset(before)


def graph_caches_are_off() -> bool:
    """Whether this is inside `graph_caches_off`."""
    return _caches_off.get()


_caches_off = contextvars.ContextVar("caches_off", default=False)


def any_host(gm: Any) -> dict[str, Any]:
    """Options for a graph of a GPU alone, so that Inductor's keys for it are the same on all hosts.

    Which g++ there is (CXX) is in them though it compiles nothing of the graph, and so is the class
    of each parameter, which a fake one does not have: that annotation is removed.
    """
    from torch._inductor import config

    for node in gm.graph.find_nodes(op="placeholder"):
        node.type = None
    gm.recompile()
    unread = getattr(config, "_cache_config_ignore_prefix", [])
    return {"_cache_config_ignore_prefix": [*unread, "cpp.cxx"]}


# What is said of a toolkit that this build of torch lacks, where a GPU is described to it.
TOOLKITS = {"cuda": "13.0", "hip": "7.0"}


def why_not_for(kind: str) -> str:
    """Why graphs compiled here fit no GPU of that kind, "" if they do.

    Torch finds them by the digest of its own files, so it must be the very build there.
    """
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}.get(kind)
    return "" if built else f"torch {VERSION} is not built for {kind.upper()}"


def prefers_cudnn_attention(major: int) -> bool:
    """Whether scaled_dot_product_attention asks cuDNN first on a GPU of NVIDIA of that capability.

    Since 2.11, with cuDNN from 9.15.1 on, which older builds of torch do not bring.
    """
    if torch.version.cuda is None or "TORCH_CUDNN_SDPA_DEPRIORITIZED" in os.environ:
        return False
    cudnn: Any = torch.backends.cudnn
    return major in (9, 10) and (cudnn.version() or 0) > 91500


@contextlib.contextmanager
def compiles_in_this_process() -> Iterator[None]:
    """Inductor starts no workers for Triton's kernels."""
    from torch._inductor import config

    inductor: Any = config
    with inductor.patch(compile_threads=1):
        yield


@contextlib.contextmanager
def no_early_workers() -> Iterator[None]:
    """Compile workers begin when there is a kernel to compile, and not with a graph on a GPU.

    As many as there are cores, each of which imports torch, for a graph that compiles nothing.
    """
    from torch._inductor.async_compile import AsyncCompile

    kind: Any = AsyncCompile
    with _workers_lock:
        if not _workers:
            _workers.append(vars(kind)["wakeup"])
            kind.wakeup = classmethod(lambda cls: None)
        _workers.append(None)
    try:
        yield
    finally:
        with _workers_lock:
            _workers.pop()
            if len(_workers) == 1:
                kind.wakeup = _workers.pop()


_workers: list[Any] = []  # what `wakeup` was, and one more for each that is inside
_workers_lock = threading.Lock()


@contextlib.contextmanager
def dynamo_unchanged() -> Iterator[list[Any]]:
    """Dynamo forgets what it compiles inside: frames, counters, shapes seen, graph breaks.

    The list is filled at the end with the graph breaks: each has a `reason` and a `user_stack`. A
    frame that had been compiled before keeps its old entries, and the new ones behind them.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import config
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.utils import counters, graph_break_reasons

    first: dict[int, tuple[Any, bool]] = {}  # code, and whether it had been compiled before

    def note(code: Any, new_code: Any) -> None:
        first.setdefault(id(code), (code, bool(_debug_get_cache_entry_list(code))))

    counts = {kind: group.copy() for kind, group in counters.items()}
    known = len(graph_break_reasons)
    breaks: list[Any] = []
    handle = register_bytecode_hook(note)
    patches: dict[str, Any] = {
        "automatic_dynamic_shapes": False,  # shapes met here must not make later ones symbolic
        "recompile_limit": 1 << 16,
        "accumulated_recompile_limit": 1 << 16,
    }
    try:
        with config.patch(patches):
            yield breaks
    finally:
        handle.remove()
        breaks += graph_break_reasons[known:]
        del graph_break_reasons[known:]
        for code, compiled_before in first.values():
            if not compiled_before:
                reset_code(code)
        for kind in counters.keys() - counts.keys():
            del counters[kind]
        for kind, group in counts.items():
            counters[kind].clear()
            counters[kind].update(group)


def sizes(value: Any) -> Any:
    """As `hints`, but a size that is a symbol stays one, with its range.

    What torch compiled for a narrower one it would take, and then raise for what was asked for.
    """
    if isinstance(value, torch.SymInt):
        node: Any = value.node
        return f"{node.expr} in {node.shape_env.bound_sympy(node.expr)}"
    return tuple(map(sizes, value.shape)) if isinstance(value, torch.Tensor) else hints(value)


def hints(value: Any) -> Any:
    """The sizes that a tensor, or a size, has now, symbols and all; None for one nobody knows."""
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if isinstance(value, torch.Tensor):
        return tuple(map(hints, value.shape))
    return value if isinstance(value, int) else None


def range_of(size: Any) -> tuple[int, int | None] | None:
    """The least and largest value of a symbol, None for none; None for a constant."""
    if not isinstance(size, torch.SymInt):
        return None
    node: Any = size.node
    bounds = node.shape_env.bound_sympy(node.expr)
    return int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else None


_CALLERS = re.compile(r"L\['(?:args'\]\[|kwargs'\]\['|)(\w+)(?:'\]|\])")


def callers_name(placeholder: Any) -> str | None:
    """What whoever calls a model calls this input of its Dynamo graph, or its number; else None."""
    input = placeholder.meta.get("grapharg")
    if input is None or input.source is None:
        return None
    name = input.source.name
    found = _CALLERS.fullmatch(name() if callable(name) else name)
    return found[1] if found else None


def adds_to_one_pixel() -> bool:
    """Whether oneDNN's convolution with an addend works where the result is one pixel wide.

    In 2.11 it fails with "could not create a memory".
    """
    return torch_minor() > (2, 12)  # 2.12 has not been tried


def static_inputs() -> list[int]:
    """The numbers of the inputs that are parameters or buffers, while a graph is compiled."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return list(metadata.static_input_indices) if metadata else []


def is_own_input(placeholder: Any) -> bool:
    """Whether it is an input of the whole graph, and no part of a tensor subclass.

    AOT autograd describes the inputs of its graphs; the bodies of higher-order ops have none.
    """
    from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput

    descriptor = placeholder.meta.get("desc")
    return descriptor is not None and not isinstance(descriptor, SubclassGetAttrAOTInput)


def is_sharded(gm: Any) -> bool:
    """Whether FSDP manages parameters of this Dynamo graph.

    It gathers them anew for each use, into the same tensors, and hides that from their versions.
    """
    inputs = (node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder"))
    sources = (input.source for input in inputs if input is not None)
    return any(source.guard_source.is_fsdp_module() for source in sources)


def is_control_flow(error: BaseException) -> bool:
    """Whether Dynamo raised this to steer itself (restart, skip a frame), not to report a fault."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
    from torch._inductor.exc import InductorError

    fault = isinstance(error, (BackendCompilerFailed, InductorError))
    return isinstance(error, TorchDynamoException) and not fault


def compiler_missing(error: BaseException) -> CompilerNotFoundError | None:
    """Our error for a missing C++ compiler when that is what made Inductor fail."""
    from torch._inductor.exc import InvalidCxxCompiler

    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, InvalidCxxCompiler):
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    if inner is None:
        return None
    return CompilerNotFoundError(
        "a working C++ compiler (g++ or clang++)",
        "none that runs",
        "Install one (`apt-get install g++`, `dnf install gcc-c++`) or set CXX to its path; "
        "`ipex-inductor doctor` checks it.",
    )


def as_pass_list(value: Any) -> list[Callable[..., Any]]:
    """A custom-pass option as a list: 2.11 takes one pass or None, later versions also lists."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
