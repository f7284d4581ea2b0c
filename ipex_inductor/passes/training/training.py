"""Rules on training graphs: a product and its epilogue in one call, on weights as they are.

The result is an equal tensor, so a rule is correct wherever the backward does not read what
vanishes: the backward of relu, sigmoid or tanh reads the result, that of a sum nothing. Weights
change at every step, so nothing is folded, packed or joined here.
`benchmarks/studies/training_rules.py` measures what pays: for large linear layers, and for bf16
ones, a step is 1.00 to 1.29 of Inductor's speed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ipex_inductor import compat
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.passes.attention import attention
from ipex_inductor.passes.attention.scores import attention_of
from ipex_inductor.passes.engine.rule import Rule, is_backward
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.fusion import conv, linear
from ipex_inductor.passes.fusion.epilogue import ACTIVATIONS, Producer, family
from ipex_inductor.passes.layout import folding
from ipex_inductor.passes.weights import plain
from ipex_inductor.reporting.decisions import GraphReport

Why = Callable[[Mapping[str, Any]], str | None]

# The fewest multiplications of a linear layer in fp32. Below, torch's kernel and a second one for
# the epilogue take 0.2 (of few) to 1.0 times as long as oneDNN's call on an unpacked weight
# (`python -m benchmarks plain_weights --only linear`).
LEAST = 1 << 26

NO_WORD = "oneDNN has no such epilogue: Inductor's own kernel follows the product"
# Epilogues that no call has, with the reason.
LACKING = {
    "conv": {a.name: NO_WORD for a in ACTIVATIONS if not UNARY[a.unary].onednn_name},
    "linear": {a.name: NO_WORD for a in ACTIVATIONS if not UNARY[a.unary].onednn_name}
    | {"add+relu": "oneDNN's linear takes an addend or an activation, not both"},
}
ATTENTION = "Inductor's own patterns of attention hold its backward too"
# Products or rules that do not pay, by name, with the measured speed of a step.
LEFT = {
    "conv": "0.92 to 1.02 of Inductor's speed in a step (benchmarks/studies/training_rules.py)",
}


def rules(notes: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return all rules for training graphs.

    Rules with an entry in `notes` (by rule or product) only report the note.
    """
    return (
        *_family(conv.producer(False), _why_not_conv, notes),
        *_family(linear.LINEAR, _why_not_linear, notes),
    )


def _family(producer: Producer, why_not: Why, notes: Mapping[str, str]) -> tuple[Rule, ...]:
    def when(values: Mapping[str, Any]) -> str | None:
        return _why_not_here(values) or producer.when(values) or why_not(values)

    def apply_note(rule: Rule) -> Rule:
        lacking = LACKING[producer.name].get(rule.name.removeprefix(f"{producer.name}+"))
        note = lacking or notes.get(rule.name) or notes.get(producer.name)
        return _only_said(rule, note) if note else rule

    # Nothing is packed, so that any tensor will do as a weight.
    family_rules = family(dataclasses.replace(producer, when=when, weights=(), training=True))
    return tuple(map(apply_note, family_rules))


def _only_said(rule: Rule, note: str) -> Rule:
    return dataclasses.replace(rule, replacement=None, op=None, note=note)


def _why_not_here(values: Mapping[str, Any]) -> str | None:
    device = values["x"].device.type
    return None if device == "cpu" else f"no fused kernel for {device} in training yet"


def _why_not_linear(values: Mapping[str, Any]) -> str | None:
    """Return why a linear layer is left to torch, None if oneDNN computes it.

    A transposed weight would be copied at every step, and oneDNN reorders an fp32 weight.
    """
    x, weight = values["x"], values["weight"]
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    sizes = compat.hints(x), compat.hints(weight)
    if x.dtype != torch.float32 or plain.may_round("matmul") or None in (*sizes[0], *sizes[1]):
        return None
    products = math.prod(sizes[0]) * sizes[1][0]
    if products >= LEAST:
        return None
    return f"torch's own kernel is faster for {products / 1e6:.2g}M multiplications in fp32"


def _why_not_conv(values: Mapping[str, Any]) -> str | None:
    """Return why a convolution is left to Inductor: `passes/weights/packing.py` rewrites it."""
    if values["x"].dim() == 3:
        return "a convolution over a line is left to Inductor"
    if not all(statically_known_true(size > 1) for size in values["x"].shape[1:]):
        return "an input of one channel or pixel has no definite layout"
    if values.get("other") is None:
        return None
    if values["groups"] != 1:
        return "oneDNN adds in a second call behind a grouped convolution"
    _, channels, *image = values["result"].shape
    one = channels == 1 or all(size == 1 for size in image)
    works = compat.adds_to_one_pixel() or not one
    return None if works else "oneDNN cannot add to one pixel or one channel"


def say_attention(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Report that handwritten attention in the forward is left to Inductor's patterns."""
    for bmm in graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        if not is_backward(bmm) and attention_of(bmm) is not None:
            report.add("left", attention.NAME, ATTENTION, user_line(bmm))


def say_batch_norms(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Report for every batch norm why it is not folded."""
    for op in (folding.NORM, *folding.TRAINING):
        for norm in graph.find_nodes(op="call_function", target=op):
            reason = "training graph: the weights it would be folded into change at every step"
            report.add("missed", "batch_norm", reason, user_line(norm))


RULES = rules(LEFT)
