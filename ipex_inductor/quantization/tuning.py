"""Search of a recipe that keeps accuracy: observers, SmoothQuant, layers in floating point."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.graphs.model_graph import refuse_names
from ipex_inductor.quantization.model_summary import plan_without
from ipex_inductor.quantization.prepared import PreparedModel
from ipex_inductor.quantization.preparing import as_tuple, convert, prepare
from ipex_inductor.quantization.qconfigs import (
    QConfigMapping,
    default_static_qconfig,
    get_smooth_quant_qconfig_mapping,
    operator_name,
)
from ipex_inductor.reporting import decisions

OBSERVERS = ("histogram", "percentile", "min_max")
RESULTS = ("trials", "baseline")  # attributes of a tuned model
ALPHAS = tuple(step / 10 for step in range(11))  # IPEX's "auto": 0 to 1 by steps of 0.1

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# Called before each piece of work: its kind ("recipe", "sensitivity" or "floating"), its subject,
# how many pieces of the kind are done, and how many there are.
Step = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class Trial:
    """One recipe that was measured; `floating` are layers that it leaves in floating point."""

    recipe: str
    floating: tuple[str, ...]
    score: float
    is_accurate: bool


@dataclass
class Tuner:
    """The state of one search."""

    model: nn.Module
    loader: Iterable[Any]
    calib_func: Callable[[nn.Module], Any] | None
    eval_func: Callable[[nn.Module], Any] | None
    criterion: Mapping[str, Any]
    deadline: float
    floating_types: Sequence[str] = ()
    step: Step = lambda kind, subject, finished, count: None
    trials: list[Trial] = field(default_factory=list)
    baseline: float = 1.0

    def tune(self, recipes: Sequence[tuple[str, QConfigMapping]], sizes: Sequence[int]) -> Any:
        """Return the first prepared model whose quantized form is accurate.

        Raises:
            QuantizationError: if there is none, or time is over.
        """
        if self.eval_func is not None:
            self.baseline = float(self.eval_func(self.model))
        measured: list[tuple[float, str, PreparedModel]] = []
        rows = [(size, *recipe) for size in sizes for recipe in recipes]
        for number, (size, name, mapping) in enumerate(rows):
            recipe = f"{name}, {size} samples"
            self.step("recipe", recipe, number, len(rows))
            prepared = self._prepare(mapping)
            self._calibrate(prepared, size)
            if self._try(prepared, recipe, ()):
                return prepared
            measured.append((self.trials[-1].score, recipe, prepared))
        _, recipe, prepared = max(measured, key=lambda each: self._rank(each[0]))
        return self._leave_layers(prepared, recipe, max(sizes))

    def _rank(self, score: float) -> float:
        return score if self.criterion.get("higher_is_better", True) else -score

    def _prepare(self, mapping: QConfigMapping) -> PreparedModel:
        for kind in self.floating_types:
            mapping.set_object_type(kind, None)
        args, kwargs = next(self._batches(1))
        prepared = prepare(self.model, mapping, args, example_kwarg_inputs=kwargs)
        assert isinstance(prepared, PreparedModel)
        return prepared

    def _calibrate(self, prepared: PreparedModel, size: int) -> None:
        with torch.no_grad():
            if self.calib_func is not None:
                self.calib_func(prepared)
                return
            for args, kwargs in self._batches(size):
                prepared(*args, **kwargs)

    def _batches(self, size: int) -> Iterator[Inputs]:
        """Yield inputs of the calibration data until they are so many samples.

        Raises:
            QuantizationError: if there are none.
        """
        count = 0
        for item in self.loader:
            args, kwargs = read_inputs(item, count_inputs(self.model))
            yield args, kwargs
            count += _count_samples(args, kwargs)
            if count >= size:
                return
        if not count:
            advice = "Its items are inputs, or pairs of inputs and labels."
            raise QuantizationError("calibration data", "a calib_dataloader without items", advice)

    def _try(self, prepared: PreparedModel, recipe: str, floating: tuple[str, ...]) -> bool:
        """Measure a recipe; return whether it is accurate."""
        if self.trials and time.monotonic() > self.deadline:
            self._give_up("time is over")
        quantized = convert(prepared)
        with torch.no_grad():
            score = self._score(quantized)
        trial = Trial(recipe, floating, score, self._is_accurate(score))
        self.trials.append(trial)
        vars(prepared).update(trials=self.trials, baseline=self.baseline)
        decisions.log.info("autotune: %s", trial)
        return trial.is_accurate

    def _score(self, quantized: nn.Module) -> float:
        if self.eval_func is not None:
            return float(self.eval_func(quantized))
        return 1 - self._error(quantized, 100)

    def _error(self, quantized: nn.Module, size: int) -> float:
        """Return the relative error of the outputs for calibration data."""
        noise = signal = 0.0
        for args, kwargs in self._batches(size):
            for exact, rough in zip(
                _floats(self.model(*args, **kwargs)),
                _floats(quantized(*args, **kwargs)),
                strict=True,
            ):
                noise += (exact - rough).square().sum().item()
                signal += exact.square().sum().item()
        return float((noise / signal) ** 0.5) if signal else float(noise > 0)

    def _is_accurate(self, score: float) -> bool:
        loss = self._rank(self.baseline) - self._rank(score)
        if "absolute" in self.criterion:
            return bool(loss <= self.criterion["absolute"])
        return bool(loss <= self.criterion.get("relative", 0.01) * abs(self.baseline))

    def _leave_layers(self, prepared: PreparedModel, recipe: str, size: int) -> PreparedModel:
        """Leave the most sensitive layers in floating point: 1, 2, 4, ... until it is accurate."""
        layers = self._rank_layers(prepared, size)
        count = 1
        while count < len(layers):
            floating = tuple(layers[:count])
            self.step("floating", ", ".join(floating), count, len(layers))
            candidate = self._without(prepared, floating, size)
            if self._try(candidate, recipe, floating):
                return candidate
            count = count + 1 if count == len(layers) - 1 else min(2 * count, len(layers) - 1)
        self._give_up("no recipe is accurate enough")
        raise AssertionError

    def _rank_layers(self, prepared: PreparedModel, size: int) -> list[str]:
        """Return the quantized layers, first the one without which the error is smallest."""
        names = [layer.name for layer in prepared.layer_decisions if layer.quantized]
        errors = {}
        for number, name in enumerate(names if len(names) > 1 else []):
            self.step("sensitivity", name, number, len(names))
            candidate = self._without(prepared, (name,), size)
            with torch.no_grad():
                errors[name] = self._error(convert(candidate), 1)
        return sorted(errors, key=errors.__getitem__)

    def _without(
        self, prepared: PreparedModel, floating: tuple[str, ...], size: int
    ) -> PreparedModel:
        """Return a calibrated model without some layers; most tensors keep their scales."""
        candidate = plan_without(prepared, set(floating))
        scales = prepared.tensor_scales()
        candidate.set_tensor_scales(
            {n: scales[n] for n in candidate.tensor_observers if n in scales}
        )
        if not candidate.tensor_observers.keys() <= scales.keys():
            self._calibrate(candidate, size)
        return candidate

    def _give_up(self, reason: str) -> None:
        best = max(self.trials, key=lambda trial: self._rank(trial.score))
        raise QuantizationError(
            f"a score within {dict(self.criterion)} of {self.baseline:.6g}",
            f"{best.score:.6g} at best, by {best.recipe} ({reason}; {len(self.trials)} recipes)",
            "Relax accuracy_criterion, give more time or samples, or leave the model as it is.",
        )


def autotune(
    model: nn.Module,
    calib_dataloader: Iterable[Any],
    calib_func: Callable[[nn.Module], Any] | None = None,
    eval_func: Callable[[nn.Module], Any] | None = None,
    op_type_dict: Mapping[str, Any] | None = None,
    sampling_sizes: Sequence[int] = (100,),
    accuracy_criterion: Mapping[str, Any] | None = None,
    tuning_time: float = 0,
    smoothquant_args: Mapping[str, Any] | None = None,
    observers: Sequence[str] = OBSERVERS,
    step: Step | None = None,
) -> nn.Module:
    """Search observers, SmoothQuant and layers in floating point until accuracy holds.

    Args:
        model: the model; it is not changed.
        calib_dataloader: items are inputs, or pairs of inputs and labels. Two tensors are inputs
            if the model has two that it needs.
        calib_func: calls a prepared model with calibration data, in place of the loader.
        eval_func: returns the accuracy of a model; without it, outputs are compared.
        op_type_dict: operators whose `dtype` allows only "fp32" stay in floating point.
        sampling_sizes: numbers of calibration samples to try.
        accuracy_criterion: `{"relative": 0.01}`, or `{"absolute": ...}`; "higher_is_better".
        tuning_time: seconds after which no recipe is begun; 0 for no limit.
        smoothquant_args: `{"alpha": ...}`, a number, several, or "auto".
        observers: the observers to try.
        step: called before each recipe, each layer whose sensitivity is measured, and each set of
            layers in floating point.

    Returns:
        A calibrated model for `convert`; `trials` on it are what was measured, `baseline` is the
        score of the model itself.

    Raises:
        QuantizationError: if no recipe holds the criterion in time, or the model has modules or
            tensors called `trials` or `baseline`.
    """
    refuse_names(model, RESULTS)
    tuner = Tuner(
        model,
        calib_dataloader,
        calib_func,
        eval_func,
        dict(accuracy_criterion or {"relative": 0.01}),
        time.monotonic() + tuning_time if tuning_time else float("inf"),
        list(_floating_types(op_type_dict or {})),
    )
    tuner.step = step or tuner.step
    recipes = _recipes(smoothquant_args, observers)
    prepared: nn.Module = tuner.tune(recipes, list(sampling_sizes))
    return prepared


def _recipes(
    smoothquant_args: Mapping[str, Any] | None, observers: Sequence[str]
) -> list[tuple[str, QConfigMapping]]:
    """Return what is tried, in its order."""
    smooth = [
        (f"SmoothQuant alpha {alpha:g}", get_smooth_quant_qconfig_mapping(alpha=alpha))
        for alpha in _alphas(smoothquant_args)
    ]
    schemes = ((name, replace(default_static_qconfig, observer=name)) for name in observers)
    plain = [(name, QConfigMapping().set_global(scheme)) for name, scheme in schemes]
    return [*smooth, *plain]


def _alphas(smoothquant_args: Mapping[str, Any] | None) -> list[float]:
    if not smoothquant_args:
        return []
    alpha = smoothquant_args.get("alpha", 0.5)
    if isinstance(alpha, str):
        return _auto_alphas(smoothquant_args.get("auto_alpha_args") or {})
    return [float(a) for a in alpha] if isinstance(alpha, Iterable) else [float(alpha)]


def _auto_alphas(args: Mapping[str, Any]) -> list[float]:
    """Return the alphas of "auto", the start first."""
    start = args.get("init_alpha", 0.5)
    low, high = args.get("alpha_min", 0.0), args.get("alpha_max", 1.0)
    step = args.get("alpha_step", 0.1)
    count = round((high - low) / step)
    alphas = [round(low + step * n, 6) for n in range(count + 1)]
    return [start, *(alpha for alpha in alphas if alpha != start)]


def _floating_types(op_type_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yield operators that must stay in floating point.

    Raises:
        QuantizationError: for a setting other than `dtype`.
    """
    for kind, settings in op_type_dict.items():
        for role, choices in settings.items():
            unknown = set(choices) - {"dtype"} if isinstance(choices, Mapping) else {role}
            if unknown:
                raise QuantizationError(
                    'an op_type_dict such as {"linear": {"activation": {"dtype": ["fp32"]}}}',
                    f"{', '.join(sorted(map(str, unknown)))} of {kind!r}",
                    "Observers and ranges are searched; leave them out.",
                )
            if list(choices["dtype"]) == ["fp32"]:
                yield operator_name(kind)


def count_inputs(model: nn.Module) -> int:
    """Return how many positional arguments a model cannot be called without."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is Parameter.empty for p in parameters)


def read_inputs(item: Any, count: int = 1) -> Inputs:
    """Return positional and keyword arguments of an item of a data loader.

    A pair is inputs and labels, unless it is two tensors and the model has `count` = 2 inputs.
    """
    is_pair = isinstance(item, (tuple, list)) and len(item) == 2
    if is_pair and (count != 2 or not isinstance(item[0], Tensor)):
        item = item[0]
    if isinstance(item, Mapping):
        return (), dict(item)
    return as_tuple(item), {}


def _count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1


def _floats(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's outputs."""
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    return [
        leaf.float() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
