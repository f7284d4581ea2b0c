"""The custom pass that is given to Inductor: rules on whole ops, then Inductor's decompositions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from ipex_inductor import compat
from ipex_inductor.errors import PassError
from ipex_inductor.passes.attention import attention, head_layouts, misread
from ipex_inductor.passes.correctness import corrections
from ipex_inductor.passes.correctness.output_strides import OutputStrides
from ipex_inductor.passes.engine.rule import apply_rules, whole_ops
from ipex_inductor.passes.engine.whole_ops import decompose
from ipex_inductor.passes.fusion import (
    batch_norm_relu,
    conv,
    left,
    library,
    linear,
    shared_input,
)
from ipex_inductor.passes.fusion.noops import drop_noops
from ipex_inductor.passes.layout import cats, channels_last, folding
from ipex_inductor.passes.pass_context import ANY_RULE, Graphs, Pass, PassContext, PassSettings
from ipex_inductor.passes.quant import (
    embedding_bags,
    fp8,
    fp8_cost,
    fp8_linears,
    fp8_records,
    fp8_sharing,
    products,
    values,
    weight_only,
)
from ipex_inductor.passes.restated import activations, restatement, upsampled
from ipex_inductor.passes.training import moments, pool, relu_masks, training
from ipex_inductor.passes.weights.packing import also_in, transpose_weights
from ipex_inductor.reporting.decisions import GraphReport

RULES = (*conv.RULES, *linear.RULES, *left.RULES)
RULE_NAMES = frozenset(rule.name for rule in RULES) | (
    folding.NAMES
    | restatement.NAMES
    | {
        upsampled.NAME,
        head_layouts.NAME,
        attention.NAME,
        batch_norm_relu.NAME,
        shared_input.NAME,
    }
)
WHOLE = whole_ops(RULES) | folding.WHOLE | attention.WHOLE | pool.WHOLE

INFERENCE, TRAINING, BOTH = Graphs.INFERENCE, Graphs.TRAINING, Graphs.BOTH


def _read_heads_in_place(c: PassContext) -> None:
    head_layouts.read_in_place(c.graph, c.report)


def _choose_layout(c: PassContext) -> None:
    c.prefers_channels_last = channels_last.is_preferred(c.graph)


def _fold_batch_norms(c: PassContext) -> None:
    off, balances = c.settings.rules_off, c.settings.balances
    folding.fold_batch_norms(c.graph, c.weights, off, c.report, balances)


def _restate(c: PassContext) -> None:
    restatement.restate(c.graph, c.settings.rules_off, c.report)


def _move_activations(c: PassContext) -> None:
    activations.move_before_views(c.graph, c.report)


def _commute_upsampling(c: PassContext) -> None:
    upsampled.commute(c.graph, c.weights, c.report)


def _transpose_weights(c: PassContext) -> None:
    transpose_weights(c.graph, c.weights)


def _fuse_attention(c: PassContext) -> None:
    attention.fuse_attention(c.graph, c.report)


def _apply_rules(c: PassContext) -> None:
    apply_rules(RULES, c.graph, c.weights, c.settings.rules_off, c.report)


def _prepare_quantized(c: PassContext) -> None:
    values.compute_zeros_from_scales(c.graph)
    values.join_batches(c.graph)
    values.decompose_rows(c.graph, "quantize_per_token")


def _quantize_products(c: PassContext) -> None:
    why_not = c.settings.why_not_quantized["int8"]
    if products.quantize_products(c.graph, c.report, why_not):
        c.prefers_channels_last = True  # the kernels read and write it
    embedding_bags.quantize_bags(c.graph, c.report, why_not)
    values.decompose_rows(c.graph, "dequantize_per_token")


def _place_fp8_linears(c: PassContext) -> None:
    fp8_linears.place_linears(c.graph, c.report, c.settings.why_not_quantized["fp8"])


def _share_fp8_inputs(c: PassContext) -> None:
    fp8_sharing.share_inputs(c.graph, c.report)


def _place_weight_only(c: PassContext) -> None:
    why_not = c.settings.why_not_quantized["weight only"]
    weight_only.place_linears(c.graph, c.settings.choose, why_not, c.table, c.report)


def _join_linears(c: PassContext) -> None:
    shared_input.join_linears(c.graph, c.weights, c.report, c.settings.shared_packing)


def _convert_to_channels_last(c: PassContext) -> None:
    channels_last.convert(c.graph, c.report, c.prefers_channels_last)


def _fuse_batch_norm_relu(c: PassContext) -> None:
    batch_norm_relu.place(c.graph, c.settings.choose, c.weights, c.table, c.report)


def _place_calls(c: PassContext) -> None:
    settings = c.settings
    library.place(c.graph, settings.choose, c.weights, c.table, c.report, measure=settings.measure)


def _report_batch_norms(c: PassContext) -> None:
    training.say_batch_norms(c.graph, c.report)


def _report_attention(c: PassContext) -> None:
    training.say_attention(c.graph, c.report)


def _apply_training_rules(c: PassContext) -> None:
    apply_rules(training.RULES, c.graph, c.weights, c.settings.rules_off, c.report)


def _place_image_calls(c: PassContext) -> None:
    library.place_images(c.graph, c.settings.choose, c.table, c.report)


def _place_gradient_calls(c: PassContext) -> None:
    library.place_weight_gradients(c.graph, c.settings.choose, c.table, c.report)


def _hide_misread_attention(c: PassContext) -> None:
    misread.keep_apart(c.graph, c.report)


# All passes in order: a graph goes through those of its kind that are not switched off.
PASSES = (
    # Rules are for weights, among which are dequantized ones.
    Pass("quantized values", INFERENCE, _prepare_quantized, products.NAME),
    # A copy behind attention may be without effect afterwards.
    Pass("attention copies", INFERENCE, _read_heads_in_place, head_layouts.NAME),
    # Patterns do not see through clones and views without effect.
    Pass("no-ops", INFERENCE, lambda c: drop_noops(c.graph), ANY_RULE),
    # No rule of linear layers is for a GEMM in FP8, or for a weight that is stored in it.
    Pass("fp8 linears", INFERENCE, _place_fp8_linears, fp8_linears.NAME),
    # Inductor's heuristic counts torch's convolutions, which rules replace.
    Pass("layout choice", INFERENCE, _choose_layout, channels_last.NAME),
    # A fold leaves a product beside its activation, which rules fuse.
    Pass("batch norm folding", INFERENCE, _fold_batch_norms, ANY_RULE, changes_weights=True),
    # Convolutions have the weights and biases of their batch norms by now.
    Pass(
        "convolutions before upsampling",
        INFERENCE,
        _commute_upsampling,
        upsampled.NAME,
        changes_weights=True,
    ),
    # Rules look for an activation right behind a convolution.
    Pass("activations", INFERENCE, _move_activations, activations.NAME),
    # Rules see the linear layers and 2D convolutions that others are restated as.
    Pass("restatements", INFERENCE, _restate, ANY_RULE, changes_weights=True),
    # Patterns of linear layers read the weight transposed.
    Pass("weight transposes", INFERENCE, _transpose_weights, changes_weights=True),
    # A rule reports a softmax as left to Inductor, which may be of an attention.
    Pass("attention", INFERENCE, _fuse_attention, attention.NAME),
    Pass("rules", INFERENCE, _apply_rules, ANY_RULE),
    # Products have their epilogues by now.
    Pass("int8 products", INFERENCE, _quantize_products, products.NAME),
    Pass("weight-only linears", INFERENCE, _place_weight_only, ANY_RULE),
    # Only layers that no rule fused are joined.
    Pass("linears on one input", INFERENCE, _join_linears, shared_input.NAME),
    # Convolutions of ours are converted too; calls are chosen for the converted layout.
    Pass(
        "channels-last",
        INFERENCE,
        _convert_to_channels_last,
        channels_last.NAME,
        condition=lambda c: c.prefers_channels_last or channels_last.has_videos(c.graph),
        changes_weights=True,
    ),
    Pass("strides", INFERENCE, lambda c: channels_last.hold_strides(c.graph), ANY_RULE),
    # It takes a convolution before the next pass takes it alone.
    Pass("batch norm and relu", INFERENCE, _fuse_batch_norm_relu, batch_norm_relu.NAME),
    # Ops of ours on a GPU end here.
    Pass("library calls", INFERENCE, _place_calls),
    # Concatenations before batch norms may be fused by now.
    Pass("shared parts", INFERENCE, lambda c: cats.rewrite(c.graph, c.report), cats.NAME),
    # Both only report, so they run before anything changes.
    Pass("batch norm report", TRAINING, _report_batch_norms, ANY_RULE),
    Pass("attention report", TRAINING, _report_attention, ANY_RULE),
    Pass("training rules", TRAINING, _apply_training_rules, ANY_RULE),
    Pass("max pools", TRAINING, lambda c: pool.replace(c.graph, c.report), pool.NAME),
    Pass("image calls", TRAINING, _place_image_calls),
    Pass("weight gradient calls", TRAINING, _place_gradient_calls),
    # Only attention that no pass took is left to Inductor's patterns.
    Pass("misread attention", BOTH, _hide_misread_attention, stage="rewritten"),
    # Passes above match whole ops; those below match what Inductor's decompositions leave.
    Pass("decompositions", BOTH, lambda c: decompose(c.graph, c.whole)),
    Pass("fp8", INFERENCE, lambda c: fp8.expand(c.graph, c.report), fp8.NAME),
    # A layer is known by its own quantizations, before it shares one.
    Pass("fp8 cost", TRAINING, lambda c: fp8_cost.leave_small(c.graph, c.report), fp8_cost.NAME),
    Pass("fp8 shared inputs", TRAINING, _share_fp8_inputs, fp8_sharing.NAME),
    # Which tensors a layer records is read before its records are merged with others.
    Pass("fp8 records", TRAINING, lambda c: fp8_records.merge(c.graph), fp8.NAME),
    Pass("fp8 report", TRAINING, lambda c: fp8.report_gemms(c.graph, c.report), fp8.NAME),
    Pass("corrections", BOTH, lambda c: corrections.correct(c.graph, c.report)),
    Pass("moments", TRAINING, lambda c: moments.rewrite(c.graph, c.report), moments.NAME),
    # A mask is read off the moments of its norm.
    Pass("relu masks", TRAINING, lambda c: relu_masks.rewrite(c.graph, c.report), relu_masks.NAME),
)
SWITCHES = frozenset(each.switch for each in PASSES if each.switch) - {ANY_RULE}


class JointPass(CustomGraphPass):
    """All rewrites of one joint or inference graph, after the user's own passes.

    Args:
        identity: What the generated code depends on besides the graph. Inductor's caches see it
            through `uuid`, the only part of their keys that this package sets.
        settings: The settings of the passes.
        report: Gets the decisions.
        user_passes: The user's own passes, which run first.
        strides: Records the strides of the results before anything changes.
    """

    def __init__(
        self,
        identity: str,
        settings: PassSettings,
        report: GraphReport,
        user_passes: list[Callable[[torch.fx.Graph], object]],
        strides: OutputStrides | None = None,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.report = report
        self.user_passes = user_passes
        self.strides = strides

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite `graph` in place. Raises `PassError` when a pass of ours fails."""
        if self.strides is not None:
            self.strides.record(graph)
        for user_pass in self.user_passes:
            user_pass(graph)
        self.report.source = "passes"
        self.report.show("traced", graph)
        graphs = TRAINING if self.settings.training or is_joint(graph) else INFERENCE
        context = PassContext(graph, self.report, self.settings, WHOLE)
        with also_in(self.settings.dtypes if graphs is INFERENCE else frozenset()):
            for each in PASSES:
                if each.is_on(graphs, self.settings.rules_off):
                    with _failing_as(f"pass {each.name!r}"):
                        each.apply(context)
        with _failing_as("the final lint"):
            graph.lint()

    def uuid(self) -> Any | None:
        """Return what identifies the rewrites; None (no caching) if a user's pass has no uuid."""
        uuids = compat.uuids_of(self.user_passes)
        return None if uuids is None else (self.identity, *uuids)


@contextmanager
def _failing_as(step: str) -> Iterator[None]:
    """Raise `PassError`, which names the step, for what is raised inside."""
    try:
        yield
    except Exception as error:
        raise PassError(
            "the joint graph pass to finish",
            f"{type(error).__name__} in {step}: {error}",
            'Please report it; options={"rules": "-*"} avoids the rules.',
        ) from error


def is_joint(graph: torch.fx.Graph) -> bool:
    """Return whether AOT autograd traced a backward too.

    It also does so when a model enables gradients itself.
    """
    return any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in graph.nodes)
