"""Describe rows of the pass list, and hold what the passes over one graph share."""

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ipex_inductor import compat
from ipex_inductor.passes.engine.whole_ops import Table, reduced_table
from ipex_inductor.passes.fusion import library
from ipex_inductor.passes.fusion.joined import Choose
from ipex_inductor.passes.weights.weight_nodes import weight_inputs, with_derived
from ipex_inductor.reporting.decisions import GraphReport

ANY_RULE = "*"  # in `rules_off`: all rules are off
WhyNot = Callable[..., str | None]  # of a device
NOT_CALLED: dict[str, WhyNot] = {
    "int8": lambda *_, **__: "int8 kernels are not called",
    "fp8": lambda *_, **__: "FP8 GEMMs are not called",
    "weight only": lambda *_, **__: "GEMMs on quantized weights are not called",
}


class Graphs(enum.Flag):
    """The kinds of graphs that a pass is for."""

    INFERENCE = enum.auto()
    TRAINING = enum.auto()
    BOTH = INFERENCE | TRAINING


@dataclass(frozen=True)
class PassSettings:
    """Settings of one compilation that the passes read.

    Args:
        rules_off: Names of rules that are off; "*" for all.
        training: Whether the graph is for training.
        choose: Returns the call that computes an op of ours on a GPU.
        measure: Measures ops of ours on a GPU for which nothing is recorded.
        why_not_quantized: By kind, a key of `NOT_CALLED`: returns why kernels of a device are
            not available, or None. That of FP8 with `calls=False`: why generated code cannot
            convert FP8.
        dtypes: The dtypes of products that kernels other than oneDNN's compute in inference.
        shared_packing: Whether linear layers on one input are joined for any number of rows.
        balances: Whether errors of weights that a pass rounds may be balanced, which takes longer
            than to round them: they must be computed ahead of the calls.
    """

    rules_off: frozenset[str] = frozenset()
    training: bool = False
    choose: Choose = library.choose_nothing
    measure: library.Measure = library.measure_nothing
    dtypes: frozenset[torch.dtype] = frozenset()
    why_not_quantized: Mapping[str, WhyNot] = field(default_factory=NOT_CALLED.copy)
    shared_packing: bool = False
    balances: bool = False


@dataclass
class PassContext:
    """One graph under rewriting, with all that its passes read and cached analyses of it.

    Args:
        graph: The graph, changed in place.
        report: Gets the decisions.
        settings: The settings of the compilation.
        whole: Names of the ops that are kept whole until rules have run.
        prefers_channels_last: Whether Inductor would lower convolutions to channels-last; a pass
            sets it while they are still torch's.
    """

    graph: torch.fx.Graph
    report: GraphReport
    settings: PassSettings
    whole: frozenset[str]
    prefers_channels_last: bool = False

    @functools.cached_property
    def weights(self) -> set[torch.fx.Node]:
        """Return the nodes that hold weights, as of the last pass that changes them.

        Nodes that other passes add later are not among them.
        """
        return weights_of(self.graph)

    @functools.cached_property
    def table(self) -> Table:
        """Return Inductor's decompositions without the ops that are kept whole."""
        return reduced_table(self.whole)

    def refresh_weights(self) -> None:
        """Recompute `weights` from the present graph."""
        self.weights = weights_of(self.graph)


@dataclass(frozen=True)
class Pass:
    """One row of the pass list.

    Args:
        name: The name in errors.
        graphs: The kinds of graphs that the pass is for.
        run: Rewrites the graph of a context in place.
        switch: The rule that switches the pass off, as "*" always does; "*" if that alone does;
            None if the pass always runs.
        condition: Returns whether the pass has anything to do.
        changes_weights: Whether the weights of the graph are other nodes afterwards.
        stage: The name under which the report shows the graph afterwards.
    """

    name: str
    graphs: Graphs
    run: Callable[[PassContext], object]
    switch: str | None = None
    condition: Callable[[PassContext], bool] | None = None
    changes_weights: bool = False
    stage: str = ""

    def is_on(self, graphs: Graphs, rules_off: frozenset[str]) -> bool:
        """Return whether the pass is for these graphs, and not switched off."""
        on = self.switch is None or rules_off.isdisjoint({ANY_RULE, self.switch})
        return on and graphs in self.graphs

    def apply(self, context: PassContext) -> None:
        """Run the pass if its condition holds, and show its stage."""
        if self.condition is None or self.condition(context):
            self.run(context)
            if self.changes_weights:
                context.refresh_weights()
        if self.stage:
            context.report.show(self.stage, context.graph)


def weights_of(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return parameters and buffers of an inference graph, and nodes computed from them alone."""
    return {*with_derived(graph, weight_inputs(graph, compat.static_inputs()))}
