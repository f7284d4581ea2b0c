"""A captured model with observers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.batch_norm import Fold, fold_batch_norms
from ipex_inductor.quantization.bias_correction import is_corrected, make_mean_observer
from ipex_inductor.quantization.capture import LAYER, capture_graph
from ipex_inductor.quantization.graphs.model_graph import ModelGraph, copy_graph
from ipex_inductor.quantization.observers import Observer, make_observer
from ipex_inductor.quantization.recipe import LayerDecision, Plan, plan_graph
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping, TensorScale


def prepare_graph(
    model: nn.Module,
    mapping: SchemeMapping,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    bn_folding: bool = True,
) -> "PreparedModel":
    """Return a captured copy of `model` that shares its parameters and has observers.

    Args:
        model: the model; it is not changed.
        mapping: which layer gets which scheme.
        args: example inputs, of which every size may differ later.
        kwargs: example keyword arguments.
        bn_folding: fold batch norms into the layers before them.

    Raises:
        QuantizationError: if the model cannot be captured, or the mapping quantizes nothing.
    """
    return observe_graph(capture_graph(model, args, kwargs), mapping, bn_folding)


def observe_graph(
    module: GraphModule, mapping: SchemeMapping, bn_folding: bool = True
) -> "PreparedModel":
    """Return a captured graph with observers; `module` itself gets its batch norms folded."""
    folds = fold_batch_norms(module.graph) if bn_folding else []
    plan = plan_graph(module.graph, mapping)
    plan.decisions += [_describe(fold) for fold in folds if not fold.layer]
    if not any(decision.quantized for decision in plan.decisions):
        reasons = {f"{d.name}: {d.reason}" for d in plan.decisions} or {"it has no such layers"}
        raise QuantizationError(
            "a model with layers to quantize (convolutions, linear layers, matmul, embedding bags)",
            f"none that can be, {'; '.join(sorted(reasons)[:5])}",
            "Change the configuration, or leave the model in floating point.",
        )
    return PreparedModel(module, plan)


def _describe(fold: Fold) -> LayerDecision:
    return LayerDecision(fold.name, "batch_norm", fold.module_path, False, fold.reason)


class PreparedModel(ModelGraph):
    """A captured model with observers at each tensor that will be quantized.

    Its outputs are those of the model. `tensor_observers` are by the name of their tensor; tensors
    that share a scale share an observer. `layer_decisions` are the decisions of the recipe.
    """

    _ipex_kept = (
        "_ipex_example_inputs",
        "_ipex_bn_folding",
        "_ipex_smoothing",
        *("trials", "baseline"),  # of `autotune`
    )
    _ipex_example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    _ipex_bn_folding: bool = True
    _ipex_smoothing: Any = None  # SmoothQuant's settings and tensors

    def __init__(self, root: GraphModule, plan: Plan) -> None:
        graph, nodes = copy_graph(root.graph)
        observers = {tensor: _observer(plan, tensor) for tensor in plan.tensors}
        for tensor, first in plan.shared.items():
            observers[tensor] = observers[first]
        places = {
            observer: f"_ipex_observer_{i}"
            for i, observer in enumerate(dict.fromkeys(observers.values()))
        }
        holder = nn.Module()
        for observer, name in places.items():
            holder.add_module(name, observer)
        for tensor, observer in observers.items():
            _insert_call(graph, nodes[tensor], places[observer])
        corrected = [weight for weight in plan.weights if is_corrected(weight)]
        means = {weight.layer: make_mean_observer(weight) for weight in corrected}
        for number, (layer, mean) in enumerate(means.items()):
            holder.add_module(f"_ipex_mean_observer_{number}", mean)
            with graph.inserting_before(nodes[layer]):
                graph.call_module(f"_ipex_mean_observer_{number}", (nodes[layer].args[0],))
        for name, child in root.named_children():
            holder.add_module(name, child)
        _share_own_state(root, holder)
        super().__init__(holder, graph)
        self._ipex_plan = plan
        self.tensor_observers = {t.meta[LAYER].name: observer for t, observer in observers.items()}
        self.layer_decisions = plan.decisions
        self._ipex_mean_observers = {layer.meta[LAYER].name: mean for layer, mean in means.items()}
        self._ipex_set_scales: dict[str, TensorScale] = {}
        self._ipex_loaded_scales: dict[str, TensorScale] = {}  # until new values are observed

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with parameters and observers of its own."""
        memo[id(self._ipex_plan)] = self._ipex_plan
        result = super().__deepcopy__(memo)
        result._ipex_plan, result.layer_decisions = self._ipex_plan, self.layer_decisions
        result.tensor_observers = memo[id(self.tensor_observers)]
        result._ipex_mean_observers = memo[id(self._ipex_mean_observers)]
        result._ipex_set_scales = dict(self._ipex_set_scales)
        result._ipex_loaded_scales = dict(self._ipex_loaded_scales)
        return result

    def tensor_scales(self) -> dict[str, TensorScale]:
        """Return scale and zero point of each quantized tensor by its name.

        Raises:
            QuantizationError: if a tensor was never observed.
        """
        tensors = self._ipex_plan.tensors
        names = {tensor.meta[LAYER].name: scheme for tensor, scheme in tensors.items()}
        known = {name for name in names if self._ipex_is_calibrated(name)}
        known |= self._ipex_set_scales.keys() | self._ipex_loaded_scales.keys()
        unseen = [name for name in names if name not in known]
        if unseen:
            raise QuantizationError(
                "a calibrated model",
                f"no values of {len(unseen)} of {len(names)} tensors, {unseen[0]!r} among them",
                "Call the prepared model with calibration data, or load a summary of scales.",
            )
        results: dict[tuple[int, bool], TensorScale] = {}  # tensors may share an observer
        return {name: self._ipex_scale(name, scheme, results) for name, scheme in names.items()}

    def _ipex_is_calibrated(self, name: str) -> bool:
        return self.tensor_observers[name].is_calibrated

    def _ipex_scale(
        self, name: str, scheme: Scheme, results: dict[tuple[int, bool], TensorScale]
    ) -> TensorScale:
        if name in self._ipex_set_scales:
            return self._ipex_set_scales[name]
        observer = self.tensor_observers[name]
        if not observer.is_calibrated:
            return self._ipex_loaded_scales[name]
        key = id(observer), scheme.symmetric
        if key not in results:
            is_fp8 = scheme.is_fp8
            found = observer.find_fp8_scale() if is_fp8 else observer.find_scale(scheme.symmetric)
            results[key] = found
        return results[key]

    def _ipex_means(self) -> dict[str, Tensor]:
        """Return the mean input of each channel by the name of the layer, for bias correction.

        Layers without calibration data are left out: files of IPEX hold scales alone.
        """
        means = {name: observer.mean() for name, observer in self._ipex_mean_observers.items()}
        return {name: mean for name, mean in means.items() if mean is not None}

    def _ipex_load(self, scales: Mapping[str, TensorScale], means: Mapping[str, Tensor]) -> None:
        """Forget all values; use these scales and mean inputs until the model is calibrated again.

        Args:
            scales: by the name of the tensor.
            means: by the name of the layer; a layer without one gets no bias correction.
        """
        for observer in self.tensor_observers.values():
            observer.reset()
        self._ipex_set_scales, self._ipex_loaded_scales = {}, dict(scales)
        for name, mean_observer in self._ipex_mean_observers.items():
            mean_observer.reset(means.get(name))

    def set_tensor_scales(self, scales: Mapping[str, TensorScale]) -> None:
        """Use these scales in place of what the observers saw.

        Raises:
            QuantizationError: if a name is none of this model's tensors, or a dtype is another.
        """
        unknown = sorted(scales.keys() - self.tensor_observers.keys())
        if unknown:
            raise QuantizationError(
                "scales of tensors of this model",
                f"{len(unknown)} unknown names, {unknown[0]!r} among them",
                "Take scales of a model with the same layers, prepared in the same way.",
            )
        schemes = {t.meta[LAYER].name: scheme for t, scheme in self._ipex_plan.tensors.items()}
        other = [name for name, scale in scales.items() if scale.is_fp8 != schemes[name].is_fp8]
        if other:
            raise QuantizationError(
                "scales of the dtype that the model was prepared with",
                f"{scales[other[0]].dtype_name} for {other[0]!r}",
                "Take scales of a model that was prepared with the same mapping.",
            )
        self._ipex_set_scales |= scales

    def save_qconf_summary(self, qconf_summary: str | Path) -> None:
        """Write scales and decisions to a JSON file."""
        from ipex_inductor.quantization import model_summary

        model_summary.save_summary(self, qconf_summary)

    def load_qconf_summary(self, qconf_summary: str | Path) -> None:
        """Use the scales and decisions of a JSON file, so that no calibration is needed.

        Raises:
            SummaryFileError: if it is missing, torn, foreign or of another model.
        """
        from ipex_inductor.quantization import model_summary

        model_summary.load_summary(self, qconf_summary)


def _observer(plan: Plan, tensor: Node) -> Observer:
    return make_observer(tensor.meta[LAYER].name, plan.tensors[tensor])


def _share_own_state(root: nn.Module, holder: nn.Module) -> None:
    for name, parameter in root._parameters.items():
        holder.register_parameter(name, parameter)
    for name, buffer in root._buffers.items():
        holder.register_buffer(name, buffer, name not in root._non_persistent_buffers_set)


def _insert_call(graph: Graph, node: Node, observer: str) -> None:
    placeholders = list(graph.find_nodes(op="placeholder"))
    before = placeholders[-1] if node.op == "placeholder" else node
    with graph.inserting_after(before):
        graph.call_module(observer, (node,))
