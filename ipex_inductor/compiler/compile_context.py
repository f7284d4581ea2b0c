"""Settings and results that all graphs of one compilation share, forward and backward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ipex_inductor import compat
from ipex_inductor.compiler.graph_cache import Folder
from ipex_inductor.config import CompileConfig
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.x86_levels import Level

if TYPE_CHECKING:
    from ipex_inductor.autotune.select import Selection

# Replacements of the compiler that only lower or read a graph.
READERS = (compat.lower_inner, compat.read_inner)


@dataclass(frozen=True, eq=False)
class CompileContext:
    """The options, choices and files of one compilation.

    Attributes:
        config: options of the compilation.
        selected: selected kernels, by encoded problem.
        graph_report: receives the decisions of this compilation.
        folder: folder of Inductor's files of this graph; None: Inductor's own folder.
        may_time: True if kernels may be timed.
        prologue: True if weight preprocessing is split off.
        captures: True if calls may be captured as CUDA graphs.
        compiler: Inductor's inner compiler, or its replacement.
        join: joins Inductor's code with the programs of the weight preprocessing.
    """

    config: CompileConfig
    selected: "Mapping[bytes, Selection]"
    graph_report: GraphReport
    folder: Folder | None
    may_time: bool
    prologue: bool
    captures: bool
    compiler: Callable[..., Any]
    join: Callable[..., Any]

    def allows(self, rule: str) -> bool:
        """Return whether a rule is switched on."""
        return not {"*", rule} & self.config.rules_off

    @property
    def only_reads(self) -> bool:
        """Return whether the compiler only lowers or reads a graph."""
        return self.compiler in READERS

    @property
    def is_packaged(self) -> bool:
        """Return whether an AOTInductor package is made."""
        return not self.is_for_use and not self.only_reads

    @property
    def is_for_use(self) -> bool:
        """Return whether the code is compiled for calls in this process."""
        return self.compiler is compat.compile_inner

    @property
    def level(self) -> Level | None:
        """Return the x86-64 level whose CPUs the graph is compiled for; None: this CPU."""
        return self.folder.level if self.folder else None
