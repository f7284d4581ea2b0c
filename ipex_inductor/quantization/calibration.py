"""`QuantConf` and `calibrate`, as releases 1.9 to 1.11 of IPEX had them.

The model is not named while it is calibrated: it is the outermost module that is called in the
block.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.files.old_summary import write_entries
from ipex_inductor.quantization.files.summary import Summary
from ipex_inductor.quantization.files.summary_file import read_summary, write_whole
from ipex_inductor.quantization.model_summary import entries_of, load_scales
from ipex_inductor.quantization.prepared import PreparedModel, prepare_graph
from ipex_inductor.quantization.qconfigs import switch_off
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping

# True while a hook of ours runs: what it calls is not observed by other blocks.
_is_observing: ContextVar[bool] = ContextVar("ipex_is_observing", default=False)


@dataclass
class Calibration:
    """A model that was called in a block, and its graph; None if it has nothing to quantize."""

    model: weakref.ref[nn.Module]
    prepared: PreparedModel | None


class QuantConf:
    """Settings and statistics of static INT8 quantization.

    Args:
        configure_file: a file of `save`, or one of IPEX's; it may not exist yet.
        qscheme: `torch.per_tensor_affine` (uint8 activations) or `torch.per_tensor_symmetric`
            (int8).
        dtype: `torch.int8`, the only one.

    Raises:
        QuantizationError: for another type or scheme.
        SummaryFileError: for a file that is torn or foreign.
    """

    def __init__(
        self,
        configure_file: str | os.PathLike[str] | None = None,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if isinstance(configure_file, torch.dtype):  # `AmpConf(torch.int8)`, its ancestor
            configure_file, dtype = None, configure_file
        if dtype != torch.int8:
            advice = "Other types need no configuration: use torch.autocast."
            raise QuantizationError("dtype=torch.int8", f"dtype={dtype}", advice)
        if qscheme not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            raise QuantizationError(
                "qscheme torch.per_tensor_affine or torch.per_tensor_symmetric",
                str(qscheme),
                "Weights have a scale for each channel anyway.",
            )
        self.qscheme, self.dtype = qscheme, dtype
        self.configure_file = None if configure_file is None else Path(configure_file)
        self.summary: Summary | None = None
        if self.configure_file is not None and self.configure_file.exists():
            self.summary = read_summary(self.configure_file)
        self._target: weakref.ref[nn.Module] | None = None
        self._calibrations: list[Calibration] = []

    @property
    def mapping(self) -> SchemeMapping:
        """Return the settings as a mapping."""
        return SchemeMapping(Scheme(symmetric=self.qscheme == torch.per_tensor_symmetric))

    def bind(self, model: nn.Module) -> None:
        """Observe calls of `model` alone, at any depth, in the blocks that follow."""
        self._target = weakref.ref(model)

    def starts_at(self, module: nn.Module) -> bool:
        """Return whether a call of `module` that is not in another one's is to be observed."""
        return self._target is None or self._target() is module

    def observe(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe the tensors inside of a call of `model`.

        Raises:
            QuantizationError: if the model cannot be captured, or has NaN or infinite values.
        """
        calibration = self._calibration_of(model) or self._begin(model, args, kwargs)
        if calibration.prepared is not None:
            calibration.prepared(*args, **kwargs)

    def _calibration_of(self, model: nn.Module) -> Calibration | None:
        return next((c for c in self._calibrations if c.model() is model), None)

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Calibration:
        """Capture a model, if it has anything to quantize: a loss that is called has not."""
        prepared = None
        if any(weight.dim() > 1 for weight in model.parameters()):
            prepared = self.prepare(model, args, kwargs)
        self._calibrations.append(Calibration(weakref.ref(model), prepared))
        return self._calibrations[-1]

    def prepare(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> PreparedModel:
        """Return the graph of a model without the layers that the file leaves in floating point."""
        prepared = prepare_graph(model, self.mapping, args, kwargs)
        if self.summary is not None:
            off = self.summary.switched_off(prepared.layer_decisions)
            mapping = switch_off(self.mapping, off)
            prepared = prepare_graph(model, mapping, args, kwargs) if off else prepared
        return prepared

    def prepared_for(self, model: nn.Module, args: tuple[Any, ...]) -> PreparedModel:
        """Return the graph of a model with the scales of the calibration, or of the file.

        A model other than the calibrated one is compared with it by the names of its layers.

        Raises:
            QuantizationError: if there is no calibration, or that of another model.
            SummaryFileError: if the file is missing or of another model.
        """
        calibration = self._calibration_of(model)
        if calibration is not None and calibration.prepared is not None:
            return calibration.prepared
        prepared = self.prepare(model, args)
        if self.graphs():
            calibrated = self.only_graph()
            _check_layers(calibrated, prepared)
            prepared.set_tensor_scales(calibrated.tensor_scales())
        elif self.summary is not None:
            load_scales(prepared, self.summary)
        elif self.configure_file is not None:
            self.summary = read_summary(self.configure_file)  # raises if it is still missing
            return self.prepared_for(model, args)
        else:
            raise QuantizationError(
                "a calibrated configuration",
                "one without statistics and without a file",
                "Call the model in a block `with calibrate(conf):`, or give QuantConf a file.",
            )
        return prepared

    def graphs(self) -> list[PreparedModel]:
        """Return the graphs of the calibrated models."""
        return [c.prepared for c in self._calibrations if c.prepared is not None]

    def only_graph(self) -> PreparedModel:
        """Return the graph of the calibrated model.

        Raises:
            QuantizationError: if no model was calibrated, or several.
        """
        graphs = self.graphs()
        if len(graphs) == 1:
            return graphs[0]
        models = ", ".join(type(c.model()).__name__ for c in self._calibrations) or "none"
        raise QuantizationError(
            "one calibrated model",
            f"{len(graphs)} with layers to quantize (modules called in the blocks: {models})",
            "Call the model itself, as a whole, in the block; use a QuantConf for each model.",
        )

    def save(self, configure_file: str | os.PathLike[str], default_recipe: bool = True) -> None:
        """Write the configuration in the form of releases 1.9 to 1.11, to be edited or deployed.

        Args:
            configure_file: the file; it is whole or not there.
            default_recipe: with False every layer is written as quantized, as a start for a
                recipe of one's own.

        Raises:
            QuantizationError: without a calibration, or with that of several models.
        """
        entries = entries_of(self.only_graph(), default_recipe)
        write_whole(configure_file, write_entries(entries))


def _check_layers(calibrated: PreparedModel, prepared: PreparedModel) -> None:
    """Raise if two graphs have layers of other names."""
    names = [{layer.name for layer in graph.layer_decisions} for graph in (calibrated, prepared)]
    if names[0] != names[1]:
        different = ", ".join(sorted(names[0] ^ names[1])[:5])
        raise QuantizationError(
            "the model that was calibrated, or one with the same layers",
            f"one that differs in {different}",
            "Calibrate the model that is converted.",
        )


@dataclass
class _Block:
    """One open block: the call that is observed, and how many calls deep it is."""

    conf: QuantConf
    thread: int = field(default_factory=threading.get_ident)
    model: nn.Module | None = None
    inputs: tuple[Any, ...] = ()
    depth: int = 0

    def is_elsewhere(self) -> bool:
        """Return whether a hook is called for another thread, our own graph, or a compiler."""
        if torch.compiler.is_compiling():
            return True
        return threading.get_ident() != self.thread or _is_observing.get()

    def enter_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the inputs of an outermost call, which may write to them."""
        if self.is_elsewhere():
            return
        if self.model is None:
            if not self.conf.starts_at(module):
                return
            self.model, self.inputs = module, _copy(args)
        self.depth += 1

    def leave_call(self, module: nn.Module, args: tuple[Any, ...], *results: Any) -> None:
        """Observe the model at the end of an outermost call.

        torch gives `kwargs` and the output; if the call failed, None as the output alone.
        """
        if self.is_elsewhere() or self.model is None:
            return
        self.depth -= 1
        if self.depth > 0:
            return
        model, inputs = self.model, self.inputs
        self.model, self.inputs, self.depth = None, (), 0
        if len(results) < 2 or results[-1] is None:
            return
        token = _is_observing.set(True)
        try:
            with _exact(model):
                self.conf.observe(_plain_model(model), _copy(inputs), _copy(results[0]))
        finally:
            _is_observing.reset(token)


def _copy(value: Any) -> Any:
    """Return arguments with copies of their tensors."""

    def clone(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(clone, value)


def _exact(model: nn.Module) -> ExitStack:
    """Return a block without gradients, autocast and inference mode.

    Tensors made in inference mode are copied in it, as no graph may write to them.
    """
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    for device in {"cpu", *(p.device.type for p in model.parameters())}:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _plain_model(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or the module."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


@contextmanager
def calibrate(conf: QuantConf, default_recipe: bool = True) -> Iterator[QuantConf]:
    """Observe the model that is called in this block, or in the decorated function.

    Blocks of one configuration accumulate. Calls of other threads are not observed. The model
    and its results are not changed; nothing stays behind at the end of the block.

    Args:
        conf: the configuration, which gets the statistics.
        default_recipe: False is accepted: layers are chosen where the configuration is saved.
    """
    if not isinstance(conf, QuantConf):
        received = f"a {type(conf).__name__}"
        raise QuantizationError("a QuantConf", received, "Make one: `conf = QuantConf()`.")
    block = _Block(conf)
    with compat.module_calls_observed(block.enter_call, block.leave_call):
        yield conf
