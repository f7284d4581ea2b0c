"""One compile request: a Dynamo graph, its inputs and options, and the keys of its code."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ipex_inductor import compat
from ipex_inductor.aot_cache.cache_root import RECORDS, home
from ipex_inductor.aot_cache.digest import digest_fields, source_digest
from ipex_inductor.aot_cache.graph_files.graphs import KIND
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.compiler import graph_cache
from ipex_inductor.config import CompileConfig
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.target.device import current
from ipex_inductor.target.x86_levels import Level, served_levels

if TYPE_CHECKING:
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.lowerings.select.selection import Policy

_COMMENT = re.compile(r"^ *#.*\n", re.MULTILINE)
_INPUT = re.compile(r"\b[GLgl]_\w+")
# Inductor's options that define how C++ is compiled, or into what; environment variables of flags.
TOLD = ("cpp_wrapper", "cpp.march", "cpp.simdlen", "cpp.enable_kernel_profile")
FLAGS = ("TORCHINDUCTOR_DEBUG_COMPILE", "TORCHINDUCTOR_DEBUG_SYMBOL")
# Defaults for a graph with cpp_wrapper, unless the user sets otherwise.
WRAPPED = {**graph_cache.NO_HEADERS, "cpp_wrapper_build_separate": True}
TORCHS = (
    "aten",
    "prims",
    "prim",
    "ipex",
    "mkldnn",
    "quantized",
    "quantized_decomposed",
    "profiler",
)


@dataclass(frozen=True, eq=False)
class Request:
    """One graph to compile; properties of it and of the process are read once per call."""

    gm: torch.fx.GraphModule
    example_inputs: Sequence[Any]
    config: CompileConfig

    @cached_property
    def training(self) -> bool:
        """Return True if gradients will be computed."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self._tensors)

    @cached_property
    def is_sharded(self) -> bool:
        """Return True if FSDP manages the parameters."""
        return compat.is_sharded(self.gm)

    @cached_property
    def devices(self) -> set[torch.device]:
        """Return the devices of the input tensors."""
        return {t.device for t in self._tensors}

    @cached_property
    def places(self) -> set[torch.device]:
        """Return the devices that the graph computes on: no CPU if all its tensors are on a GPU.

        The code of such a graph does not depend on the host, unless host compilers take part.
        """
        modules = (m for m in self.gm.modules() if isinstance(m, torch.fx.GraphModule))  # branches
        example_values = [node.meta.get("example_value") for m in modules for node in m.graph.nodes]
        leaves = tree_leaves([example_values, *self.example_inputs])
        values = (v for v in leaves if isinstance(v, torch.Tensor))
        devices_met = {v.device for v in values if v.device.type != "meta"}
        return (
            devices_met | {torch.device("cpu")}
            if not devices_met or self._compiles_on_host
            else devices_met
        )

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Return Inductor's options for this call: the mode's options, then the user's."""
        options = {**compat.mode_options(self.config.mode), **dict(self.config.inductor)}
        if options.pop("freezing", False):
            warn_once(
                "option 'freezing' has no effect per call (Dynamo reads it globally before calling "
                "a backend); the weight preprocessing replaces it and keeps the caches"
            )
        if self.config.autotune == "never":
            options["deterministic"] = True  # or padding and reductions are timed
        return MappingProxyType(options)

    @cached_property
    def wraps_in_cpp(self) -> bool:
        """Return True if cpp_wrapper is enabled by default: in inference on CPUs.

        It makes a call 1 to 5 % faster, and a cold start a second or two slower.
        """
        is_set = "cpp_wrapper" in dict(self.config.inductor) or self.option("cpp_wrapper")
        # Inductor may read the variable as false.
        is_set = is_set or "TORCHINDUCTOR_CPP_WRAPPER" in os.environ
        in_python = self.runs_sycl or self.has_users_ops  # it calls kernels from Python
        on_cpus = all(place.type == "cpu" for place in self.places)
        return on_cpus and not (is_set or in_python or self.training or self.is_sharded)

    def wrapped_in_cpp(self) -> "Request":
        """Return the request with cpp_wrapper enabled."""
        # Modes set CUDA graphs for GPUs, and torch warns if both options are set.
        more = {"cpp_wrapper": True, "triton.cudagraphs": False}
        options = tuple(sorted({**WRAPPED, **dict(self.config.inductor), **more}.items()))
        return replace(self, config=replace(self.config, inductor=options, wrapped=True))

    def option(self, name: str) -> Any:
        """Return Inductor's setting `name` for this call; None if this torch version lacks it."""
        return self.options.get(name, getattr(torch._inductor.config, name, None))

    @cached_property
    def has_users_pass(self) -> bool:
        """Return True if a custom pass of the user gets the graph."""
        return any(self.option(name) for name in compat.USERS_PASSES)

    @cached_property
    def may_time(self) -> bool:
        """Return True if the user enabled kernel timing, by mode or by an option."""
        if self.config.autotune != "auto":
            return self.config.autotune == "always"
        max_autotune = self.option("max_autotune") or self.option("max_autotune_gemm")
        return bool(max_autotune) and not self.option("deterministic")

    @cached_property
    def allows_first_call(self) -> bool:
        """Return True if graph, options and process allow measuring kernels at the first call.

        The graph has to be inference on NVIDIA GPUs. Ranks of one model do not measure, as each
        could choose otherwise. The key contains this value, so that no rank finds code that another
        process measured, and the option changes no key of other graphs.
        """
        on_nvidia = any(d.type == "cuda" for d in self.devices) and torch.version.hip is None
        is_inference = not (self.training or self.is_sharded)
        is_default = self.config.autotune == "auto" and not self.may_time
        is_enabled = self.config.autotune_first_call and is_default and not graph_cache.is_rank()
        return is_enabled and is_inference and on_nvidia

    @cached_property
    def policy(self) -> "Policy":
        """Return the policy of kernel selection: its database, timing, tables and predictor."""
        from ipex_inductor.lowerings.select import selection

        return selection.Policy(
            selection.database_of(self.config.autotune_database),
            self.may_time,
            self.config.autotune_budget_s,
            tables=self.config.autotune in ("always", "never"),  # only if set explicitly
            guesses=self.config.autotune != "never",
        )

    @cached_property
    def may_capture(self) -> bool:
        """Return True if `capture` is on, and the graph and the user's options allow it."""
        config, named = self.config, "triton.cudagraphs"
        is_enabled = (
            config.capture and config.mode == "default" and named not in dict(config.inductor)
        )
        plain = not (self.training or self.is_sharded or self.option("cpp_wrapper"))
        nvidia = any(d.type == "cuda" for d in self.devices) and torch.version.hip is None
        return is_enabled and plain and nvidia and not self.option(named)

    @property
    def tables(self) -> Mapping[str, str]:
        """Return the digests of the package's tables of library calls that apply, by architecture.

        Empty if records are used, which have priority: tuning writes some. So the graph need not be
        lowered twice.
        """
        gpus = {place for place in self.places if place.type == "cuda"}
        asks = self.config.autotune not in ("inductor", "never")
        if not gpus or not asks or self.policy.records(gpus):
            return {}
        from ipex_inductor.autotune.select import table_digest
        from ipex_inductor.lowerings.problem.selector_hook import arch_of

        digests = {arch: table_digest(arch) for arch in sorted(map(arch_of, gpus))}
        return {arch: digest for arch, digest in digests.items() if digest}

    @property
    def may_have_choices(self) -> bool:
        """Return True if records or a predictor may select kernels, before importing their readers.

        The import takes 1 % of a start. There is no predictor for CPUs, and tables are read only if
        set.
        """
        config = self.config
        is_configured = config.autotune != "auto" or config.autotune_database or self.may_time
        on_cpus = all(device.type == "cpu" for device in self.devices)
        return bool(is_configured) or not on_cpus or (home() / RECORDS).exists()

    def identity(
        self,
        selected: "Mapping[bytes, Selection]" = MappingProxyType({}),
        level: Level | None = None,
    ) -> str:
        """Return one digest of everything that this backend's part of the code depends on.

        Args:
            selected: selected kernels, by encoded problem.
            level: ISA level shared by all target CPUs; cached oneDNN primitives are disabled.
        """
        fields = self.identity_fields(selected)
        uses_primitives = level is None and "cpu" in self._device_types
        if uses_primitives and (version := graph_cache.onednn()):
            # oneDNN chooses the layout of weights by the number of threads.
            fields |= {"onednn": version, "threads": torch.get_num_threads()}
        return digest_fields(fields)

    def identity_fields(self, selected: "Mapping[bytes, Selection]") -> dict[str, Any]:
        """Return the fields of `identity`: sources, options, devices and selected kernels."""
        return {
            "sources": source_digest(),
            "rules_off": tuple(sorted(self.config.rules_off)),
            "weight_prologue": (self.config.weight_prologue, self.config.weight_prologue_bytes),
            "drop_plain_weights": self.config.drop_plain_weights,
            "shared_packing": self.config.shared_packing,
            "training": self.training,
            "sharded": self.is_sharded,
            "sycl": self._sycl,
            "blocked_products": self.config.blocked_products,
            "capture": self.config.capture,
            "targets": tuple(current(kind).arch for kind in self._device_types),
            "selected": _selected_digest(selected),
            "tables": tuple(self.tables.items()),
            "leaves": self.may_time,
            # Not what was measured there: an entry keeps it, and a prebuilt one serves as well.
            "first_call": self.allows_first_call,
        }

    def key(
        self,
        selected: "Mapping[bytes, Selection]",
        kind: str = KIND,
        more: Mapping[str, Any] = MappingProxyType({}),
        level: Level | None = None,
    ) -> Key:
        """Return the key of the cache entry.

        Args:
            selected: selected kernels, by encoded problem.
            kind: kind of the entry.
            more: further facts that the code depends on.
            level: ISA level shared by all CPUs that may load the entry, with any number of threads.
        """
        identity = self.identity_fields(selected)
        for name in ("sources", "targets"):  # they are separate fields of the key
            del identity[name]
        problem = {**self._problem_fields, **more}
        problem["graph"] = hashlib.sha256(self.text.encode()).hexdigest()
        # An entry for a range of sizes is found by all sizes in it: torch's own keys guard it.
        problem["sizes"] = tuple(repr(compat.sizes(value)) for value in self._traced_inputs)
        if level:
            problem["settings"] = self._settings(but="threads")
        return graph_cache.key_of(identity, problem, dict(self.options), self.places, kind, level)

    def levels(self) -> tuple[Level, ...]:
        """Return the x86-64 levels whose cached graph this machine may load, highest first.

        Empty if the user sets how C++ is compiled, or if kernels are timed.
        """
        on_cpu = all(place.type == "cpu" for place in self.places)
        is_customized = any(self.option(name) for name in TOLD) or any(map(os.environ.get, FLAGS))
        return (
            served_levels()
            if on_cpu and not (is_customized or self.may_time or self.runs_sycl)
            else ()
        )

    def digest(self) -> str:
        """Return the digest of everything that the problems of the graph depend on."""
        return digest_fields(
            {
                "identity": self.identity(),
                "torch": compat.VERSION,
                "inductor": tuple((n, graph_cache.option_text(v)) for n, v in self.config.inductor),
                **self._problem_fields,
            }
        )

    @cached_property
    def _problem_fields(self) -> dict[str, Any]:
        """Return the graph, its sizes, and the process state that affects compilation."""
        return {
            "settings": self._settings(),
            "autocast": tuple(
                (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
                for kind in self._device_types
            ),
            "sizes": tuple(repr(compat.hints(value)) for value in self.example_inputs),
            "graph": _text(self.gm),
        }

    def _settings(self, but: str = "") -> tuple[str, ...]:
        from ipex_inductor.lowerings.problem.settings import settings_of

        settings = (
            {n: v for n, v in settings_of(k).items() if n != but} for k in self._device_types
        )
        return tuple(map(repr, settings))

    @property
    def text(self) -> str:
        """Return the Dynamo graph as text, independent of the location of the user's code."""
        return str(self._problem_fields["graph"])

    @cached_property
    def has_users_ops(self) -> bool:
        """Return True if the graph calls custom ops whose code the key does not cover."""
        graphs = (m.graph for m in self.gm.modules() if isinstance(m, torch.fx.GraphModule))
        targets = (node.target for graph in graphs for node in graph.nodes)
        return any(_namespace(target) not in ("", *TORCHS) for target in targets)

    @property
    def runs_sycl(self) -> bool:
        """Return True if the code may call SYCL kernels: on an Intel GPU, or by option."""
        return self.config.sycl == "cpu" or any(place.type == "xpu" for place in self.places)

    @property
    def _sycl(self) -> str:
        """Return the SYCL option and its installed runtime, which graphs call; "" if unused."""
        if not self.runs_sycl:
            return ""
        from ipex_inductor.lowerings.common.sycl import describe_runtime

        return f"{self.config.sycl}: {describe_runtime()}"

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [t for t in self.example_inputs if isinstance(t, torch.Tensor)]

    @property
    def _traced_inputs(self) -> list[Any]:
        """Return the inputs as Dynamo traced them, with symbols for dynamic sizes."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        pairs = zip(inputs, self.example_inputs, strict=False)
        return [node.meta.get("example_value", value) for node, value in pairs]

    @property
    def _device_types(self) -> list[str]:
        return sorted({place.type for place in self.places})

    @property
    def _compiles_on_host(self) -> bool:
        """Return True if a graph on a GPU alone needs a host compiler (g++, nvcc)."""
        backends = ("max_autotune_gemm_backends", "max_autotune_conv_backends")
        cutlass = any("CUTLASS" in str(self.option(name)).upper() for name in backends)
        return cutlass or bool(self.option("cpp_wrapper"))


def _namespace(target: Any) -> str:
    """Return the namespace of an op, "" for other callables; Dynamo may leave the overload open."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    return target._qualified_op_name.split("::")[0] if packet else ""


def _text(gm: torch.fx.GraphModule) -> str:
    """Return a Dynamo graph as text without source locations, and with numbered inputs."""
    names: dict[str, str] = {}
    inputs = {s for n in gm.graph.find_nodes(op="placeholder") for s in (n.name, str(n.target))}

    def rename_input(match: re.Match[str]) -> str:
        is_input = match[0] in inputs
        return names.setdefault(match[0], f"input_{len(names)}") if is_input else match[0]

    text = _COMMENT.sub("", gm.print_readable(print_output=False, include_stride=True))
    return _INPUT.sub(rename_input, text)


def _selected_digest(selected: "Mapping[bytes, Selection]") -> str:
    if not selected:
        return ""
    from ipex_inductor.autotune.select import digest

    return digest((problem, selection.choice) for problem, selection in selected.items())
