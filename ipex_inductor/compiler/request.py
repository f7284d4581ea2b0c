"""What is asked for: a Dynamo graph, its inputs and the options; and what its code depends on."""

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
from ipex_inductor.aot_cache.graphs import KIND
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.compiler import graph_cache
from ipex_inductor.config import CompileConfig
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.target.device import current
from ipex_inductor.target.x86_levels import Level, served

if TYPE_CHECKING:
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.lowerings.select.selection import Policy

_COMMENT = re.compile(r"^ *#.*\n", re.MULTILINE)
_INPUT = re.compile(r"\b[GLgl]_\w+")
# Inductor's options that say how C++ is compiled, or into what, and variables that say flags.
TOLD = ("cpp_wrapper", "cpp.march", "cpp.simdlen", "cpp.enable_kernel_profile")
FLAGS = ("TORCHINDUCTOR_DEBUG_COMPILE", "TORCHINDUCTOR_DEBUG_SYMBOL")
# Of a graph whose kernels C++ calls, unless the user says otherwise.
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
    """One graph to compile; what is read of it and of the process holds for the call."""

    gm: torch.fx.GraphModule
    example_inputs: Sequence[Any]
    config: CompileConfig

    @cached_property
    def training(self) -> bool:
        """Whether gradients will be asked of it."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self._tensors)

    @cached_property
    def sharded(self) -> bool:
        """Whether FSDP manages its parameters."""
        return compat.is_sharded(self.gm)

    @cached_property
    def devices(self) -> set[torch.device]:
        """Where its inputs are."""
        return {t.device for t in self._tensors}

    @cached_property
    def places(self) -> set[torch.device]:
        """The devices that it computes on: no CPU where all that Dynamo saw is on a GPU.

        What such a graph is made into depends on nothing of the host, unless its compilers take
        part.
        """
        modules = (m for m in self.gm.modules() if isinstance(m, torch.fx.GraphModule))  # branches
        seen = [node.meta.get("example_value") for m in modules for node in m.graph.nodes]
        leaves = tree_leaves([seen, *self.example_inputs])
        values = (v for v in leaves if isinstance(v, torch.Tensor))
        found = {v.device for v in values if v.device.type != "meta"}
        return found | {torch.device("cpu")} if not found or self._compiles_on_host else found

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Inductor's options for this call: those of the mode, then the user's own."""
        options = {**compat.mode_options(self.config.mode), **dict(self.config.inductor)}
        if options.pop("freezing", False):
            warn_once(
                "option 'freezing' has no effect per call (Dynamo reads it globally before a "
                "backend is asked); the weight prologue does its work and keeps the caches"
            )
        if self.config.autotune == "never":
            options["deterministic"] = True  # or padding and reductions are timed
        return MappingProxyType(options)

    @cached_property
    def wraps_in_cpp(self) -> bool:
        """Whether C++ is to call its kernels, by our choice: in inference on CPUs.

        That takes 1 to 5 % less of a call, and at a cold start a second or two more.
        """
        named = "cpp_wrapper" in dict(self.config.inductor) or self.option("cpp_wrapper")
        named = named or "TORCHINDUCTOR_CPP_WRAPPER" in os.environ  # which Inductor may read as no
        in_python = self.runs_sycl or self.has_users_ops  # what it calls
        on_cpus = all(place.type == "cpu" for place in self.places)
        return on_cpus and not (named or in_python or self.training or self.sharded)

    def wrapped_in_cpp(self) -> "Request":
        """The same with C++ that calls its kernels."""
        # Those modes set the second for GPUs, and torch warns of both.
        more = {"cpp_wrapper": True, "triton.cudagraphs": False}
        options = tuple(sorted({**WRAPPED, **dict(self.config.inductor), **more}.items()))
        return replace(self, config=replace(self.config, inductor=options, wrapped=True))

    def option(self, name: str) -> Any:
        """Inductor's setting of that name, for this call; None for one that this torch has not."""
        return self.options.get(name, getattr(torch._inductor.config, name, None))

    @cached_property
    def has_users_pass(self) -> bool:
        """Whether a pass of the user's is to see the graph."""
        return any(self.option(name) for name in compat.USERS_PASSES)

    @cached_property
    def may_time(self) -> bool:
        """Whether the user asked for kernels to be timed, by option, by mode or as of Inductor."""
        if self.config.autotune != "auto":
            return self.config.autotune == "always"
        asked = self.option("max_autotune") or self.option("max_autotune_gemm")
        return bool(asked) and not self.option("deterministic")

    @cached_property
    def policy(self) -> "Policy":
        """What may say which kernels it gets."""
        from ipex_inductor.lowerings.select import selection

        return selection.Policy(
            selection.database_of(self.config.autotune_database),
            self.may_time,
            self.config.autotune_budget_s,
            tables=self.config.autotune in ("always", "never"),  # asked for by name
            guesses=self.config.autotune != "never",
        )

    @cached_property
    def may_capture(self) -> bool:
        """Whether `ipex_inductor.capture` may look at it; who names a way to capture has his."""
        config, named = self.config, "triton.cudagraphs"
        asked = config.capture and config.mode == "default" and named not in dict(config.inductor)
        plain = not (self.training or self.sharded or self.option("cpp_wrapper"))
        nvidia = any(d.type == "cuda" for d in self.devices) and torch.version.hip is None
        return asked and plain and nvidia and not self.option(named)

    @property
    def tables(self) -> Mapping[str, str]:
        """The package's tables that say what library calls it gets: architectures and digests.

        Only where no records are looked into, which come first: tuning makes some. So it need not
        be lowered twice.
        """
        gpus = {place for place in self.places if place.type == "cuda"}
        asks = self.config.autotune not in ("inductor", "never")
        if not gpus or not asks or self.policy.records(gpus):
            return {}
        from ipex_inductor.autotune.select import table_digest
        from ipex_inductor.lowerings.problem.selector_hook import arch_of

        known = {arch: table_digest(arch) for arch in sorted(map(arch_of, gpus))}
        return {arch: digest for arch, digest in known.items() if digest}

    @property
    def may_have_choices(self) -> bool:
        """Whether records or a model may say something: seen without importing what reads them.

        That takes 1 % of a start. No model is of CPUs, nor is a table looked into unless asked for.
        """
        config = self.config
        asked = config.autotune != "auto" or config.autotune_database or self.may_time
        on_cpus = all(device.type == "cpu" for device in self.devices)
        return bool(asked) or not on_cpus or (home() / RECORDS).exists()

    def identity(
        self,
        selected: "Mapping[bytes, Selection]" = MappingProxyType({}),
        level: Level | None = None,
    ) -> str:
        """What our part of the generated code depends on, as one digest.

        `level`: of CPUs that all of them have it of, for which oneDNN's primitives are not kept.
        """
        fields = self.identity_fields(selected)
        kept = level is None and "cpu" in self._kinds
        if kept and (version := graph_cache.onednn()):
            # Weights lie as it wants them for so many threads.
            fields |= {"onednn": version, "threads": torch.get_num_threads()}
        return digest_fields(fields)

    def identity_fields(self, selected: "Mapping[bytes, Selection]") -> dict[str, Any]:
        """Sources, options, devices and selections."""
        return {
            "sources": source_digest(),
            "rules_off": tuple(sorted(self.config.rules_off)),
            "weight_prologue": (self.config.weight_prologue, self.config.weight_prologue_bytes),
            "drop_plain_weights": self.config.drop_plain_weights,
            "training": self.training,
            "sharded": self.sharded,
            "sycl": self._sycl,
            "blocked_products": self.config.blocked_products,
            "capture": self.config.capture,
            "targets": tuple(current(kind).arch for kind in self._kinds),
            "selected": _selected_digest(selected),
            "tables": tuple(self.tables.items()),
            "leaves": self.may_time,
        }

    def key(
        self,
        selected: "Mapping[bytes, Selection]",
        kind: str = KIND,
        more: Mapping[str, Any] = MappingProxyType({}),
        level: Level | None = None,
    ) -> Key:
        """What an entry of this kind is found by; `more`: what else its code depends on.

        `level`: of CPUs that all of them find it, whatever their number of threads.
        """
        identity = self.identity_fields(selected)
        for name in ("sources", "targets"):  # fields of their own
            del identity[name]
        problem = {**self._problem_fields, **more}
        problem["graph"] = hashlib.sha256(self.text.encode()).hexdigest()
        # What serves a range of sizes is found by all of them: torch guards it by its own keys.
        problem["sizes"] = tuple(repr(compat.sizes(value)) for value in self._traced)
        if level:
            problem["settings"] = self._settings(but="threads")
        return graph_cache.key_of(identity, problem, dict(self.options), self.places, kind, level)

    def levels(self) -> tuple[Level, ...]:
        """Those of x86-64 of which it may be one's graph, and compiled elsewhere, highest first.

        None where somebody says how its C++ is compiled, or kernels are timed.
        """
        on_cpu = all(place.type == "cpu" for place in self.places)
        told = any(self.option(name) for name in TOLD) or any(map(os.environ.get, FLAGS))
        return served() if on_cpu and not (told or self.may_time or self.runs_sycl) else ()

    def digest(self) -> str:
        """What the problems of the graph depend on."""
        return digest_fields(
            {
                "identity": self.identity(),
                "torch": compat.VERSION,
                "inductor": tuple((n, graph_cache.said(v)) for n, v in self.config.inductor),
                **self._problem_fields,
            }
        )

    @cached_property
    def _problem_fields(self) -> dict[str, Any]:
        """What there is to compile, and the state of the process that it is compiled under."""
        return {
            "settings": self._settings(),
            "autocast": tuple(
                (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
                for kind in self._kinds
            ),
            "sizes": tuple(repr(compat.hints(value)) for value in self.example_inputs),
            "graph": _text(self.gm),
        }

    def _settings(self, but: str = "") -> tuple[str, ...]:
        from ipex_inductor.lowerings.problem.settings import settings_of

        found = ({n: v for n, v in settings_of(k).items() if n != but} for k in self._kinds)
        return tuple(map(repr, found))

    @property
    def text(self) -> str:
        """The Dynamo graph as text, the same wherever the user's code stands."""
        return str(self._problem_fields["graph"])

    @cached_property
    def has_users_ops(self) -> bool:
        """Whether ops take part of whose code the key knows nothing."""
        graphs = (m.graph for m in self.gm.modules() if isinstance(m, torch.fx.GraphModule))
        targets = (node.target for graph in graphs for node in graph.nodes)
        return any(_namespace(target) not in ("", *TORCHS) for target in targets)

    @property
    def runs_sycl(self) -> bool:
        """Whether its code may call kernels in SYCL: those of an Intel GPU by record, as asked."""
        return self.config.sycl == "cpu" or any(place.type == "xpu" for place in self.places)

    @property
    def _sycl(self) -> str:
        """The option, and what runs such kernels here: a cached graph calls them."""
        if not self.runs_sycl:
            return ""
        from ipex_inductor.lowerings.common.sycl import installed

        return f"{self.config.sycl}: {installed()}"

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [t for t in self.example_inputs if isinstance(t, torch.Tensor)]

    @property
    def _traced(self) -> list[Any]:
        """The inputs as Dynamo saw them, with symbols for sizes that are no constants."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        pairs = zip(inputs, self.example_inputs, strict=False)
        return [node.meta.get("example_value", value) for node, value in pairs]

    @property
    def _kinds(self) -> list[str]:
        return sorted({place.type for place in self.places})

    @property
    def _compiles_on_host(self) -> bool:
        """Whether g++ or nvcc make something of a graph that is on a GPU alone."""
        backends = ("max_autotune_gemm_backends", "max_autotune_conv_backends")
        cutlass = any("CUTLASS" in str(self.option(name)).upper() for name in backends)
        return cutlass or bool(self.option("cpp_wrapper"))


def _namespace(target: Any) -> str:
    """Of an op, "" for other things that are called; Dynamo leaves it open which overload it is."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    return target._qualified_op_name.split("::")[0] if packet else ""


def _text(gm: torch.fx.GraphModule) -> str:
    """A Dynamo graph without where the user's code stands, and how it names what goes in."""
    names: dict[str, str] = {}
    own = {s for n in gm.graph.find_nodes(op="placeholder") for s in (n.name, str(n.target))}

    def numbered(found: re.Match[str]) -> str:
        known = found[0] in own
        return names.setdefault(found[0], f"input_{len(names)}") if known else found[0]

    text = _COMMENT.sub("", gm.print_readable(print_output=False, include_stride=True))
    return _INPUT.sub(numbered, text)


def _selected_digest(selected: "Mapping[bytes, Selection]") -> str:
    if not selected:
        return ""
    from ipex_inductor.autotune.select import digest

    return digest((problem, selection.choice) for problem, selection in selected.items())
