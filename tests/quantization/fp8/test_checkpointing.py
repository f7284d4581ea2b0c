"""Regions of `torch.utils.checkpoint`: run again with the scales of their pass, counted once."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.fp8 import (
    DelayedScaling,
    checkpoint_contexts,
    fp8_autocast,
    prepare_fp8,
)

RECIPE = DelayedScaling(amax_history_len=4)


class Blocks(nn.Module):
    """Two blocks, each of which may be checkpointed."""

    def __init__(self, run=None):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.run = run

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x) if self.run else block(x)
        return x


def plain(block, x):
    return checkpoint(block, x, use_reentrant=False)


def nested(block, x):
    return checkpoint(lambda v: checkpoint(block, v, use_reentrant=False), x, use_reentrant=False)


def with_contexts(block, x):
    return checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)


def without_early_stop(block, x):
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return plain(block, x)


def pair(run):
    model = prepare_fp8(Blocks())
    twin = copy.deepcopy(model)
    twin.run = run
    return model, twin


def assert_same(model, twin):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(p, q), name


def inputs(count=6):
    return [torch.randn(4, 8) * 2**n for n in range(count)]


@pytest.mark.parametrize("run", [plain, nested, with_contexts, without_early_stop])
def test_checkpointed_blocks_train_alike(run):
    model, twin = pair(run)
    for x in inputs():
        for m in (model, twin):
            with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
                y = m(x)
            y.square().sum().backward()
        assert_same(model, twin)


@pytest.mark.parametrize("run", [plain, with_contexts])
def test_each_pass_is_run_again_with_its_own_scales(run):
    """Two passes, then their backwards in both orders, which no queue of scales can serve."""
    model, twin = pair(run)
    for order in ((0, 1), (1, 0)):
        for m in (model, twin):
            outputs = []
            for x in (torch.ones(2, 8), torch.ones(3, 8) * 7):
                with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
                    outputs.append(m(x))
            for number in order:
                outputs[number].square().sum().backward()
        assert_same(model, twin)


def test_a_block_inside_of_the_region():
    model, twin = pair(None)

    def run(m, x):
        with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
            return m(x)

    for x in inputs():
        run(model, x).square().sum().backward()
        checkpoint(run, twin, x, use_reentrant=False).square().sum().backward()
        assert_same(model, twin)


def test_a_region_around_layers_inside_and_outside_of_a_block():
    model, twin = pair(None)

    def run(m, x):
        x = m.blocks[0](x)
        with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
            x = m.blocks[1](x)
        return m.blocks[0](x)

    for x in inputs():
        run(model, x).square().sum().backward()
        checkpoint(run, twin, x, use_reentrant=False).square().sum().backward()
        assert_same(model, twin)


def test_two_blocks_inside_of_a_region_are_refused():
    model = prepare_fp8(nn.Linear(8, 8))

    def run(x):
        for _ in range(2):
            with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
                x = model(x)
        return x

    with pytest.raises(QuantizationError, match="outside of the region"):
        checkpoint(run, torch.ones(2, 8), use_reentrant=False)


@pytest.mark.parametrize("inside", [False, True])
def test_the_reentrant_form_is_refused(inside):
    model = prepare_fp8(nn.Linear(8, 8))
    x = torch.ones(2, 8, requires_grad=True)
    with fp8_autocast(enabled=True):
        y = checkpoint(model, x, use_reentrant=True)
        if inside:
            with pytest.raises(QuantizationError, match="use_reentrant=False"):
                y.sum().backward()
    if not inside:
        with pytest.raises(QuantizationError, match="use_reentrant=False"):
            y.sum().backward()


def test_settings_are_restored_after_the_backward():
    model, twin = pair(plain)
    x = inputs(1)[0]
    with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        y = twin(x)
    y.sum().backward()
    twin.run = None
    model.load_state_dict(twin.state_dict())
    assert torch.equal(model(x), twin(x))
    assert torch.equal(twin(x), Blocks.forward(twin, x))
    assert torch.equal(
        twin.blocks[0][0].fp8_scaling.scales[..., 0],
        twin.blocks[0][0].fp8_scaling.forward_state[:2],
    )


def test_compiled_blocks_need_the_contexts():
    """One graph, with variants for the pass and its recomputation."""
    model, twin = pair(with_contexts)
    for number, block in enumerate(twin.blocks):
        twin.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    for x in inputs(4):
        for m in (model, twin):
            with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
                y = m(x)
            y.square().sum().backward()
        assert_same(model, twin)


def test_a_compiled_model_with_checkpointed_blocks():
    model, twin = pair(plain)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for x in inputs(4):
        for m in (model, compiled):
            with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
                y = m(x)
            y.square().sum().backward()
        assert_same(model, twin)
