"""The custom pass that is given to Inductor: rules on whole ops, then Inductor's decompositions."""

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.graph import GraphLowering

from ipex_inductor import compat
from ipex_inductor.errors import PassError
from ipex_inductor.passes.attention import attention, misread
from ipex_inductor.passes.correctness import corrections
from ipex_inductor.passes.correctness.output_strides import OutputStrides
from ipex_inductor.passes.engine.rule import apply_rules, whole_ops
from ipex_inductor.passes.engine.whole_ops import decompose, reduced_table
from ipex_inductor.passes.fusion import (
    batch_norm_relu,
    conv,
    joined,
    left,
    library,
    linear,
    shared_input,
)
from ipex_inductor.passes.fusion.noops import drop_noops
from ipex_inductor.passes.layout import cats, channels_last, folding
from ipex_inductor.passes.training import moments, pool, relu_masks, training
from ipex_inductor.passes.weights.packing import also_in, transpose_weights
from ipex_inductor.passes.weights.prologue import weight_inputs, weight_only
from ipex_inductor.reporting.decisions import GraphReport

RULES = (*conv.RULES, *linear.RULES, *left.RULES)
RULE_NAMES = frozenset(rule.name for rule in RULES) | (
    folding.NAMES | {attention.NAME, batch_norm_relu.NAME, shared_input.NAME}
)
WHOLE = whole_ops(RULES) | folding.WHOLE | attention.WHOLE | pool.WHOLE


class JointPass(CustomGraphPass):
    """All rewrites of one joint or inference graph, after the user's own passes.

    Args:
        identity: What the generated code depends on besides the graph. Inductor's caches see it
            through `uuid`, the only part of their keys that this package sets.
        rules_off: Names of rules that are off; "*" for all.
        training: Whether the graph is for training.
        report: Gets the decisions.
        user_passes: The user's own passes, which run first.
        choose: Returns the call that computes an op of ours on a GPU.
        dtypes: The dtypes of products that kernels other than oneDNN's compute.
        strides: Records the strides of the results before anything changes.
    """

    def __init__(
        self,
        identity: str,
        rules_off: frozenset[str],
        training: bool,
        report: GraphReport,
        user_passes: list[Callable[[torch.fx.Graph], object]],
        choose: joined.Choose = library.nothing,
        dtypes: frozenset[torch.dtype] = frozenset(),
        strides: OutputStrides | None = None,
    ) -> None:
        self.identity = identity
        self.rules_off = rules_off
        self.training = training
        self.report = report
        self.user_passes = user_passes
        self.choose = choose
        self.dtypes = dtypes
        self.strides = strides

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite `graph` in place. Raises `PassError` when a pass of ours fails."""
        if self.strides is not None:
            self.strides.record(graph)
        for user_pass in self.user_passes:
            user_pass(graph)
        self.report.source = "passes"
        self.report.show("traced", graph)
        training = self.training or is_joint(graph)
        try:
            if training:
                self._rewrite_training(graph)
            else:
                with also_in(self.dtypes):
                    self._rewrite(graph)
            misread.keep_apart(graph, self.report)
            self.report.show("rewritten", graph)
            decompose(graph, WHOLE)
            corrections.correct(graph, self.report)
            if training and not {"*", moments.NAME} & self.rules_off:
                moments.rewrite(graph, self.report)
            if training and not {"*", relu_masks.NAME} & self.rules_off:
                relu_masks.rewrite(graph, self.report)
            graph.lint()
        except Exception as error:
            raise PassError(
                "the joint graph pass to finish",
                f"{type(error).__name__}: {error}",
                'Please report it; options={"rules": "-*"} avoids the rules.',
            ) from error

    def _rewrite(self, graph: torch.fx.Graph) -> None:
        if "*" not in self.rules_off:
            drop_noops(graph)
        converts = not {"*", channels_last.NAME} & self.rules_off and _is_better_last(graph)
        folding.fold_batch_norms(graph, weights_of(graph), self.rules_off, self.report)
        transpose_weights(graph, weights_of(graph))
        weights = weights_of(graph)
        if not {"*", attention.NAME} & self.rules_off:
            attention.fuse_attention(graph, self.report)
        apply_rules(RULES, graph, weights, self.rules_off, self.report)
        if not {"*", shared_input.NAME} & self.rules_off:
            shared_input.join_linears(graph, weights, self.report)
        if converts:
            channels_last.convert(graph, self.report)
            weights = weights_of(graph)
        if "*" not in self.rules_off:
            channels_last.hold_strides(graph)
        context = self.choose, weights, reduced_table(WHOLE), self.report
        if not {"*", batch_norm_relu.NAME} & self.rules_off:
            batch_norm_relu.place(graph, *context)
        library.place(graph, *context)
        if not {"*", cats.NAME} & self.rules_off:
            cats.rewrite(graph, self.report)

    def _rewrite_training(self, graph: torch.fx.Graph) -> None:
        if "*" not in self.rules_off:
            training.say_batch_norms(graph, self.report)
            training.say_attention(graph, self.report)
        apply_rules(training.RULES, graph, weights_of(graph), self.rules_off, self.report)
        if not {"*", pool.NAME} & self.rules_off:
            pool.replace(graph, self.report)
        table = reduced_table(WHOLE)
        library.place_images(graph, self.choose, table, self.report)
        library.place_weight_gradients(graph, self.choose, table, self.report)

    def uuid(self) -> Any | None:
        """Return what identifies the rewrites; None (no caching) if a user's pass has no uuid."""
        uuids = compat.uuids_of(self.user_passes)
        return None if uuids is None else (self.identity, *uuids)


def weights_of(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return parameters and buffers of an inference graph, and nodes computed from them alone."""
    inputs = weight_inputs(graph, compat.static_inputs())
    return {*inputs, *weight_only(graph, inputs)}


def _is_better_last(graph: torch.fx.Graph) -> bool:
    """Return whether Inductor would lower convolutions of this graph to channels-last."""
    images = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    gm = graph.owning_module
    if gm is None or not any(map(channels_last.is_on_cpu_or_gpu, images)):
        return False
    return GraphLowering.decide_layout_opt(gm, is_inference=True)


def is_joint(graph: torch.fx.Graph) -> bool:
    """Return whether AOT autograd traced a backward too.

    It also does so when a model enables gradients itself.
    """
    return any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in graph.nodes)
