"""`gptq`: quantize a model block by block with calibration data."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.graphs.copying import copy_with
from ipex_inductor.quantization.weight_only.gptq import GPTQSettings, Hessian, round_by_gptq
from ipex_inductor.quantization.weight_only.linear import WeightOnlyLinear, is_conv1d, read_weight
from ipex_inductor.quantization.weight_only.models import (
    Decisions,
    Plan,
    Step,
    WeightOnlyDecision,
    check_model,
    check_names,
    check_values,
    nothing_to_quantize,
    plan_layers,
    replace_layers,
)
from ipex_inductor.quantization.weight_only.qconfig import (
    QConfigWoq,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
)
from ipex_inductor.quantization.weight_only.saving import check_sizes, save_gptq
from ipex_inductor.reporting import decisions as reports

BITS = {4: WoqWeightDtype.INT4, 8: WoqWeightDtype.INT8}
UNREACHED = "rounded to nearest: no calibration data reached it"


@torch.no_grad()
def gptq(
    model: nn.Module,
    dataloader: Iterable[Any],
    group_size: int = 128,
    wbits: int = 4,
    sym: bool = False,
    percdamp: float = 0.01,
    act_order: bool = False,
    nsamples: int = 128,
    *,
    weight_dtype: WoqWeightDtype | None = None,
    lowp_mode: WoqLowpMode = WoqLowpMode.NONE,
    skip: Iterable[str] = (),
    inplace: bool = False,
    save_dir: str | os.PathLike[str] | None = None,
    step: Step | None = None,
) -> nn.Module:
    """Return a model whose weights are quantized by GPTQ with calibration data.

    The blocks of a decoder are quantized one after the other. Memory holds the activations between
    two blocks and the Hessians of one block. Layers outside of the blocks, as `lm_head`, stay in
    floating point. A model without one list of blocks is calibrated as a whole.

    Args:
        model: the model.
        dataloader: inputs of the model: tensors, tuples of positional or mappings of keyword
            arguments.
        group_size: weights of a row that share a scale; -1 is the whole row, else a power of two.
        wbits: 4 or 8.
        sym: quantize without zero points.
        percdamp: share of the Hessian's mean diagonal that is added to it.
        act_order: round columns with large activations first.
        nsamples: the number of inputs to use.
        weight_dtype: type of the stored weights; None for integers of `wbits`.
        lowp_mode: precision of the GEMM.
        skip: paths of modules that stay in floating point.
        inplace: change the model itself; after an error it has the layers that were finished.
        save_dir: folder to write a checkpoint in GPTQ's format to, for other programs too.
        step: called before each block: its path, the number of those before it, that of all.

    Raises:
        QuantizationError: for settings or data that cannot be used.
    """
    qconfig = _read_settings(wbits, weight_dtype, sym, group_size, lowp_mode)
    settings = GPTQSettings(
        qconfig.storage, group_size, qconfig.is_symmetric, float(percdamp), act_order
    )
    check_model(model)
    names = check_names(model, skip)
    samples = [_as_call(sample) for sample in islice(dataloader, nsamples)]
    if not samples:
        raise QuantizationError("calibration data", "none", "Pass a list of inputs of the model.")
    result = model if inplace else copy_with(model, {})
    plan, decisions = plan_layers(result, lambda name, module: qconfig, names)
    check_values(plan)
    blocks = find_blocks(result)
    with _in_inference(result):
        calls = _capture_calls(result, blocks, samples) if blocks else None
        if calls is None:
            blocks = {"": result}
        plan = _leave_out_others(plan, decisions, blocks)
        if not plan:
            raise nothing_to_quantize(decisions)
        if save_dir is not None:
            check_sizes({name: row[0] for name, row in plan.items()}, qconfig)
        for number, (path, block) in enumerate(blocks.items()):
            if step is not None:
                step(path, number, len(blocks))
            part = {name: plan.pop(name) for name in [*plan] if _is_inside(name, path)}
            run = _runner(block, samples, calls, number)
            _quantize_block(result, part, decisions, run, settings)
    if save_dir is not None:
        save_gptq(result, save_dir)
    return result


def _read_settings(
    wbits: int, weight_dtype: Any, sym: bool, group_size: int, lowp_mode: WoqLowpMode
) -> QConfigWoq:
    """Return the settings of every layer.

    Raises:
        QuantizationError: for bits that no type has, and settings that do not go together.
    """
    if weight_dtype is None:
        if wbits not in BITS:
            advice = "Pass one of them, or weight_dtype=WoqWeightDtype.NF4."
            raise QuantizationError("wbits 4 or 8", repr(wbits), advice)
        weight_dtype = BITS[wbits]
    scheme = WoqWeightQScheme.SYMMETRIC if sym else WoqWeightQScheme.UNDEFINED
    return QConfigWoq(weight_dtype, lowp_mode, group_size=group_size, weight_qscheme=scheme)


@dataclass
class Call:
    """Arguments of a call of a module. Those of a block lack its first, the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Any = None
    hidden_name: str = ""

    def run(self, module: nn.Module) -> Any:
        """Call a block on the hidden states and return its own."""
        if self.hidden_name:
            output = module(*self.args, **{**self.kwargs, self.hidden_name: self.hidden})
        else:
            output = module(self.hidden, *self.args, **self.kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output


def _as_call(sample: Any) -> Call:
    if isinstance(sample, Mapping):
        return Call((), dict(sample))
    return Call(tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), {})


@contextmanager
def _in_inference(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and without a cache of keys and values."""
    modes = {module: module.training for module in model.modules()}
    config: Any = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    model.eval()
    if cache:
        config.use_cache = False
    try:
        yield
    finally:
        if cache:
            config.use_cache = cache
        for part in model.modules():
            part.training = modes.get(part, modes[model])


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of the one list of equal blocks that a model has, by their paths.

    Empty if there is no such list, or more than one: encoder and decoder, images and text.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(_is_inside(name, path) for path in lists):
            continue
        classes = {type(block) for block in module}
        linear = (isinstance(m, nn.Linear) or is_conv1d(m) for m in module.modules())
        if len(module) > 1 and len(classes) == 1 and any(linear):
            lists[name] = module
    if len(lists) != 1:
        return {}
    (path, blocks), *_ = lists.items()
    return {f"{path}.{number}": block for number, block in enumerate(blocks)}


def _is_inside(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _leave_out_others(plan: Plan, decisions: Decisions, blocks: Mapping[str, nn.Module]) -> Plan:
    """Return the plan of layers in blocks, and add decisions about the others."""
    inside = {name: row for name, row in plan.items() if any(_is_inside(name, p) for p in blocks)}
    reason = "it lies outside of the decoder's blocks"
    for name in plan.keys() - inside.keys():
        size = plan[name][0].weight.nbytes
        decisions[name] = WeightOnlyDecision(name, False, "", reason, size, size)
    return inside


def _capture_calls(
    model: nn.Module, blocks: Mapping[str, nn.Module], samples: list[Call]
) -> list[list[Call]] | None:
    """Return the calls of each block for each sample; None if blocks do not follow one another.

    Only the first block's calls have hidden states. Other arguments are references that blocks
    share.
    """
    calls: list[list[Call]] = [[] for _ in blocks]
    last: list[Any] = [None]
    follow = [True]

    def note_call(number: int) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            name = "" if args else next(iter(kwargs), "")
            hidden = args[0] if args else kwargs.get(name)
            others = {key: value for key, value in kwargs.items() if key != name or args}
            if number and hidden is not last[0]:
                follow[0] = False
            calls[number].append(Call(args[1:], others, None if number else hidden, name))

        return note

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        last[0] = output[0] if isinstance(output, (tuple, list)) else output

    handles = []
    for number, block in enumerate(blocks.values()):
        handles.append(block.register_forward_pre_hook(note_call(number), with_kwargs=True))
        handles.append(block.register_forward_hook(note_output))
    try:
        for sample in samples:
            model(*sample.args, **sample.kwargs)
            if not follow[0] or any(len(row) != len(calls[0]) for row in calls):
                reports.log.info("gptq calibrates the whole model: its blocks form no chain")
                return None
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _runner(
    block: nn.Module, samples: list[Call], calls: list[list[Call]] | None, number: int
) -> Callable[[bool], None]:
    """Return a function that runs a block on all samples.

    Its argument says whether the outputs go to the calls of the next block.
    """

    def run(hand_on: bool) -> None:
        if calls is None:
            for sample in [] if hand_on else samples:
                block(*sample.args, **sample.kwargs)
            return
        for index, call in enumerate(calls[number]):
            output = call.run(block)
            if hand_on and number + 1 < len(calls):
                calls[number + 1][index].hidden = output
            if hand_on:
                call.hidden = None

    return run


def _quantize_block(
    model: nn.Module,
    plan: Plan,
    decisions: Decisions,
    run: Callable[[bool], None],
    settings: GPTQSettings,
) -> None:
    """Quantize the layers of one block and run it again for the next one.

    Args:
        model: the model around it.
        plan: its layers.
        decisions: of layers; those of the block are added.
        run: of `_runner`.
        settings: of GPTQ.
    """
    hessians = {id(row[0]): Hessian(*_depth(row[0])) for row in plan.values()}
    with _observing([row[0] for row in plan.values()], hessians):
        run(False)
    unreached = [name for name, row in plan.items() if not hessians[id(row[0])].rows]

    def quantize(linear: Any, qconfig: QConfigWoq) -> WeightOnlyLinear:
        hessian = hessians.pop(id(linear))
        if not hessian.rows:
            return WeightOnlyLinear.from_linear(linear, qconfig)
        quantized = round_by_gptq(read_weight(linear), hessian.total, settings)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        layer = WeightOnlyLinear(quantized, bias, qconfig.compute).move_to_huge_pages()
        return layer.train(linear.training)

    replace_layers(model, plan, decisions, quantize)
    for name in unreached:
        reports.log.warning("%s is %s", name, UNREACHED)
        decisions[name] = replace(decisions[name], note=UNREACHED)
    if unreached:
        replace_layers(model, {}, decisions, quantize)  # the report again
    run(True)


def _depth(linear: nn.Module) -> tuple[int, torch.device]:
    """Return K of a linear layer, and its device."""
    weight = read_weight(linear)
    return weight.shape[1], weight.device


@contextmanager
def _observing(layers: list[Any], hessians: Mapping[int, Hessian]) -> Iterator[None]:
    """Add the activations of layers to their Hessians.

    Layers that read one tensor one after the other, as those of queries, keys and values, share
    the product.
    """
    recent: list[Any] = [None, None]

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        if recent[0] is not x:
            rows = x.reshape(-1, x.shape[-1]).float()
            recent[:] = x, rows.t() @ rows
        hessians[id(module)].add(recent[1], x.numel() // x.shape[-1])

    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield
    finally:
        recent.clear()
        for handle in handles:
            handle.remove()
