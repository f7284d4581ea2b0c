"""Kernels of a quantized model's layers: compile it once, with each node named after its layer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from ipex_inductor import compat
from ipex_inductor.capture.policy import at_once
from ipex_inductor.inspection.capture_reports import compile_reporting
from ipex_inductor.inspection.kernel_times import KernelTime, recorded_kernels, time_nodes
from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.converted import QuantizedModel
from ipex_inductor.quantization.graphs.model_graph import ModelGraph, copy_graph, share_state
from ipex_inductor.quantization.operators import ACTIVATIONS, ADDS, LAYERS, readers
from ipex_inductor.reporting.decisions import GraphReport

KINDS = ("int8", "fp8")  # with which names of quantized kernels begin
NO_KERNEL = "no kernel on quantized values for this operator; it reads dequantized ones"
BETWEEN = " | "  # names of several layers that may be computed by one kernel
FRAME = re.compile(r'File "(.*)", line 1, in layer$')
# Targets of nodes that compute layers; activations and additions behind them are not timed.
PRODUCT = re.compile(r"conv|linear|mm\b|matmul|blocked|product|winograd|embedding_bag")
TARGET = re.compile(r"^(\w+): [^=]* = ([\w.]+?)(?:\.default)?\(", re.MULTILINE)


@dataclass(frozen=True)
class LayerKernel:
    """The kernel of a layer: its name, why it is not quantized, its milliseconds in a call."""

    name: str = ""
    reason: str = ""
    milliseconds: float | None = None


def find_kernels(
    quantized: QuantizedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, LayerKernel]:
    """Compile a quantized model, run it a few times, and return the kernel of each layer.

    Caches are off for this compilation, and it leaves no traces.

    Args:
        quantized: the model.
        args: positional arguments of its calls.
        kwargs: keyword arguments.
    """
    reports: list[GraphReport] = []
    model = _name_lines(quantized)
    with (
        torch.no_grad(),
        compat.dynamo_unchanged(),
        compat.graph_caches_off(),
        at_once(),
        recorded_kernels(),
    ):
        run = compile_reporting(model, reports)
        run(*args, **kwargs)
        compiled = list(reports)
        times = time_nodes(lambda: run(*args, **kwargs))
    kernels: dict[str, LayerKernel] = {}
    for report in compiled:
        kernels |= _kernels_of(report, times if len(compiled) == 1 else {})
    names = (layer.name for layer in quantized.layer_decisions if layer.quantized)
    # Inductor computes a layer without a call and without an event, such as the product of a matrix
    # and a vector, in code of its own.
    return {name: LayerKernel("", NO_KERNEL) for name in names} | kernels if compiled else kernels


def _name_lines(quantized: QuantizedModel) -> ModelGraph:
    """Return a copy of a model whose nodes have the names of layers as their source lines."""
    graph, _ = copy_graph(quantized.graph)
    for node in graph.nodes:
        label = BETWEEN.join(_layers_of(node))
        node.meta["stack_trace"] = f'  File "{label}", line 1, in layer'
    holder = nn.Module()
    share_state(quantized, holder)
    return ModelGraph(holder, graph)


def _layers_of(node: Node) -> list[str]:
    """Return the names of the layers whose kernel may compute a node."""
    if node.target in LAYERS:
        return [node.meta[LAYER].name]
    arguments = node.args[:1] if node.target in ACTIVATIONS else ()
    arguments = node.args[:2] if node.target in ADDS else arguments
    operands = [a for a in arguments if isinstance(a, Node) and len(readers(a)) == 1]
    return [name for operand in operands for name in _layers_of(operand)]


def _kernels_of(report: GraphReport, times: Mapping[str, KernelTime]) -> dict[str, LayerKernel]:
    """Return the kernel of each layer of one compiled graph."""
    pairs = TARGET.findall((report.stages or {}).get("compiled", ""))
    targets = {name: target for name, target in pairs if PRODUCT.search(target)}
    lines = {name: _candidates(line) for name, line in report.lines.items() if name in targets}
    calls = _assign({name: layers for name, layers in lines.items() if layers})
    events = [e for e in report.events if e.subject.startswith(KINDS)]
    fired = _assign_events(events, "fired")
    refused = _assign_events(events, "missed")
    kernels = {}
    for layer in {*calls.values(), *fired, *refused}:
        nodes = [name for name, owner in calls.items() if owner == layer]
        microseconds = [times[name].microseconds for name in nodes if name in times]
        target = ", ".join(targets[name] for name in nodes)
        reason = refused[layer].reason if layer in refused else NO_KERNEL
        is_quantized = layer in fired or any(kind in target for kind in KINDS)
        kernels[layer] = LayerKernel(
            fired[layer].subject if layer in fired else target,
            "" if is_quantized else reason,
            sum(microseconds) / 1000 if microseconds and len(microseconds) == len(nodes) else None,
        )
    return kernels


def _assign_events(events: Sequence[Any], kind: str) -> dict[str, Any]:
    """Return the event of each layer among those of one kind."""
    numbered = dict(enumerate(event for event in events if event.kind == kind))
    owners = _assign({n: _candidates(event.where) for n, event in numbered.items()})
    return {layer: numbered[n] for n, layer in owners.items()}


def _assign(candidates: Mapping[Any, Sequence[str]]) -> dict[Any, str]:
    """Give each key one of its layers, first where there is no choice."""
    owners: dict[Any, str] = {}
    for key, layers in sorted(candidates.items(), key=lambda item: len(item[1])):
        free = [layer for layer in layers if layer not in owners.values()]
        if layers:
            owners[key] = (free or layers)[0]
    return owners


def _candidates(line: str) -> list[str]:
    match = FRAME.search(line)
    return match[1].split(BETWEEN) if match and match[1] else []
