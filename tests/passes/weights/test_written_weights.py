"""Results follow the weights, however they are written: ways that real libraries write them."""

import copy
import ctypes
import functools
import io
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ipex_inductor.passes.weights import derived, weight_reader, weight_results
from ipex_inductor.reporting import decisions

SIZES = {"small": 16, "large": 512}  # compared whole at each call, and by samples


class Net(nn.Module):
    """Two packed weights and one that is multiplied by a vector ahead."""

    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, 24)
        self.w, self.scale = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) @ (self.w * self.scale)


class Writer:
    """Writes in two steps: before the calls between (`prepare`), and behind them (`write`)."""

    def __init__(self, write, prepare=None):
        self.write, self.prepare = write, prepare or (lambda model: None)


def now(write):
    return Writer(lambda model, _: write(model))


def each(write):
    """Write each parameter."""
    return now(lambda model: [write(p) for p in model.parameters()])


def held(prepare, write):
    """Write through what was held since before the calls between."""
    return Writer(lambda model, kept: [write(k) for k in kept], prepare=prepare)


def merge_lora(model):
    a, b = torch.randn(2, model.up.in_features), torch.randn(model.up.out_features, 2)
    model.up.weight.data += b @ a


def keep_vector(model):
    vector = parameters_to_vector(model.parameters()).clone()
    vector_to_parameters(vector, model.parameters())
    return vector


def evolve(model, vector):
    vector.mul_(1.5)
    vector_to_parameters(vector, model.parameters())


def from_arrays(model):
    arrays = [p.numpy().copy() for p in model.parameters()]
    for p, array in zip(list(model.parameters()), arrays, strict=True):
        p.data = torch.from_numpy(array)
    return arrays


def from_buffers(model):
    buffers = [bytearray(p.numpy().tobytes()) for p in model.parameters()]
    for p, buffer in zip(list(model.parameters()), buffers, strict=True):
        p.data = torch.frombuffer(buffer, dtype=torch.float32).view_as(p)
    return [np.frombuffer(buffer, np.float32) for buffer in buffers]


def in_shared_memory(model):
    model.share_memory()


def by_a_child(write):
    """Write in another process."""

    def run(model, _):
        child = os.fork()
        if not child:
            try:
                write(model)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    return Writer(run, prepare=in_shared_memory)


def poke(model, count=4):
    """Write `count` bytes by a raw pointer: 4 are one element."""
    ctypes.memset(model.up.weight.data_ptr() + 400, 0x40, count)


def memset(p):
    ctypes.memset(p.data_ptr(), 0x3F, p.nbytes)


def mapped_from_file(model):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights")
        torch.save(model.state_dict(), path)
        state = torch.load(path, mmap=True, weights_only=True)
        model.load_state_dict(state, assign=True)


def from_safetensors(model):
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "weights"))
        save_file(model.state_dict(), path)
        model.load_state_dict(load_file(path), assign=True)


def quantize(p):
    step = p.data.abs().max() / 7
    p.data.copy_((p.data / step).round() * step)


def average(model):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(Net(model.up.in_features))
    for p, mean in zip(model.parameters(), averaged.module.parameters(), strict=True):
        p.data.copy_(mean.data)


class Moving:
    """An average of weights that is put in their place and taken away again."""

    def __init__(self, model):
        self.average = [2 * p.data for p in model.parameters()]
        self.stored = [p.data.clone() for p in model.parameters()]

    def copy_to(self, model):
        for p, mean in zip(model.parameters(), self.average, strict=True):
            p.data.copy_(mean)

    def restore(self, model):
        for p, stored in zip(model.parameters(), self.stored, strict=True):
            p.data.copy_(stored)


def averaged_before(model):
    moving = Moving(model)
    moving.copy_to(model)
    return moving


def step_by_hand(model):
    with torch.enable_grad():
        size = model.up.in_features
        model(torch.randn(3, size)).square().mean().backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-1.0)
        p.grad = None


def step_of(make, model):
    optimizer = make(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def prune(model):
    mask = torch.rand_like(model.up.weight) > 0.2
    model.up.weight.data.mul_(mask)


def swap_layers(model):
    first, second = nn.Parameter(torch.randn_like(model.w)), model.w
    first.data, second.data = second.data, first.data


def custom_op(model):
    """An operator whose schema says nothing of what it writes."""
    with torch.library._scoped_library("ipex_test_written", "FRAGMENT") as library:
        library.define("spoil(Tensor w) -> ()")
        library.impl("spoil", memset, "CPU")
        torch.ops.ipex_test_written.spoil(model.up.weight)


def inference_mode(write):
    def run(model):
        with torch.inference_mode():
            write(model)

    return now(run)


SGD = functools.partial(torch.optim.SGD, lr=0.5)
WRITES = {
    # PEFT, diffusers, Lightning, reinforcement learning, GANs
    "data, added to": each(lambda p: p.data.add_(1)),
    "LoRA merged": now(merge_lora),
    "average put in place": now(lambda model: Moving(model).copy_to(model)),
    "average taken away": Writer(lambda m, moving: moving.restore(m), prepare=averaged_before),
    "target network": each(lambda p: p.data.lerp_(torch.ones_like(p), 0.3)),
    "clipped": each(lambda p: p.data.clamp_(-0.01, 0.01)),
    "masked": each(lambda p: p.data.mul_(0.5)),
    "pruned": now(prune),
    "quantized": each(quantize),
    "averaged by SWA": now(average),
    "initialized": each(lambda p: nn.init.normal_(p)),
    "initialized through data": now(
        lambda m: m.apply(lambda x: isinstance(x, nn.Linear) and x.weight.data.normal_())
    ),
    "row of data": now(lambda m: m.up.weight.data[3].zero_()),
    "element of data": now(lambda m: m.up.weight.data.view(-1).__setitem__(5, 9.0)),
    "data of a view": now(lambda m: m.up.weight[2].data.fill_(3)),
    "data of a detached": now(lambda m: m.up.weight.detach().data.fill_(0.3)),
    "detached data": now(lambda m: m.up.weight.data.detach().mul_(2)),
    "foreach on data": now(lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 1.5)),
    "out": each(lambda p: torch.add(p.data, 1, out=p.data)),
    "data moved between": now(swap_layers),
    "step by hand": now(step_by_hand),
    "step of SGD": now(functools.partial(step_of, SGD)),
    "fused step": now(functools.partial(step_of, functools.partial(torch.optim.Adam, fused=True))),
    # held and written later
    "alias": held(lambda m: [p.data for p in m.parameters()], lambda a: a.mul_(1.5)),
    "alias of an alias": held(
        lambda m: [p.data.view(-1)[:5] for p in m.parameters()], lambda a: a.fill_(2)
    ),
    "detached alias": held(lambda m: [p.data.detach() for p in m.parameters()], torch.Tensor.neg_),
    "state dict": held(lambda m: [m.state_dict()["up.weight"]], lambda w: w.mul_(2)),
    "another parameter": held(lambda m: [nn.Parameter(m.w.data)], lambda w: w.mul_(2)),
    "vector": Writer(evolve, prepare=keep_vector),
    "vector without being set": Writer(lambda m, v: v.mul_(1.5), prepare=keep_vector),
    # memory that is handed out
    "numpy": each(lambda p: p.detach().numpy().__imul__(2)),
    "array, one element": held(
        lambda m: [m.up.weight.detach().numpy()], lambda a: a.__setitem__((1, 1), 7)
    ),
    "asarray": held(
        lambda m: [np.asarray(m.up.weight.detach())[2:4]], lambda a: a.__setitem__(0, 5)
    ),
    "from numpy": held(from_arrays, lambda a: a.__imul__(2)),
    "from numpy, one element": held(from_arrays, lambda a: a.reshape(-1).__setitem__(3, 8)),
    "from a buffer": held(from_buffers, lambda a: a.__setitem__(3, 8)),
    "DLPack": each(lambda p: torch.from_dlpack(p.detach()).mul_(2)),
    "DLPack, held": held(
        lambda m: [torch.from_dlpack(m.up.weight.detach())], lambda t: t.view(-1)[3].fill_(7)
    ),
    "numpy by DLPack": held(
        lambda m: [np.from_dlpack(m.w.detach())],
        lambda a: ctypes.memset(a.ctypes.data, 0x40, 4),
    ),
    "storage": each(lambda p: p.untyped_storage().fill_(0)),
    "storage, held": held(
        lambda m: [m.up.weight.untyped_storage()], lambda s: s.__setitem__(7, 0x40)
    ),
    # memory of others
    "shared memory": by_a_child(lambda m: [memset(p) for p in m.parameters()]),
    "shared memory, one element": by_a_child(poke),
    "mapped from a file": Writer(
        lambda m, _: [p.data.mul_(2) for p in m.parameters()], prepare=mapped_from_file
    ),
    "safetensors": Writer(
        lambda m, _: [p.data.mul_(2) for p in m.parameters()], prepare=from_safetensors
    ),
    # nothing that torch knows
    "raw pointer": each(memset),
    "row by a raw pointer": now(lambda m: memset(m.up.weight[:4])),
    "custom operator": now(custom_op),
    # other ways of torch
    "index": now(lambda m: m.up.weight.__setitem__((slice(None), 0), 3.0)),
    "inference mode": inference_mode(lambda m: [p.mul_(2) for p in m.parameters()]),
    "data in inference mode": inference_mode(lambda m: [p.data.mul_(2) for p in m.parameters()]),
    "set": now(lambda m: m.w.set_(torch.randn(24, 8))),
    "swapped": now(lambda m: torch.utils.swap_tensors(m.w, nn.Parameter(torch.randn(24, 8)))),
    "to another dtype and back": now(lambda m: m.to(torch.bfloat16).to(torch.float32)),
}
# Parts of a weight: a sample hits 4 of 512 rows once in 128 calls.
SPARSE = ("row by a raw pointer",)


@pytest.fixture(autouse=True)
def _grad_off():
    with torch.no_grad():
        yield


def compiled(**options):
    """Return one graph for all models of a size."""
    options = {"options": {"strict": True}, **options}
    return torch.compile(lambda model, x: model(x), backend="ipex", **options)


def agree(fn, model, x, name):
    """Compare; sums of up to 512 terms twice, in another order, of which some cancel."""
    got, want = fn(model, x), model(x)
    error = ((got - want).abs().max() / want.abs().max().clamp(min=1)).item()
    assert error <= 1e-5, f"{name}: off by {error:.1e} of the largest"


def check(fn, name, size):
    """Write as `WRITES[name]` does, twice: at once behind the first call, and later."""
    model, x = Net(size).eval(), torch.randn(4, size)
    agree(fn, model, x, f"{name}, at first")
    for _ in range(2):
        for p in model.parameters():
            p.normal_()
        kept = WRITES[name].prepare(model)
        for _ in range(3):
            agree(fn, model, x, f"{name}, prepared")
        before = model(x)
        WRITES[name].write(model, kept)
        assert not torch.equal(before, model(x)), f"{name}: else this test shows nothing"
        for _ in range(2):
            agree(fn, model, x, name)


def failures(fn, size, names):
    found = []
    for name in names:
        try:
            check(fn, name, size)
        except AssertionError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_results_follow_at_the_next_call(size):
    names = [name for name in WRITES if size == "small" or name not in SPARSE]
    assert len(names) > 50
    assert failures(compiled(), SIZES[size], names) == []
    assert any(e.kind == "hoisted" for r in decisions.reports() for e in r.events)


MODES = {
    "dynamic": {"dynamic": True},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs", "options": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_results_follow_in_mode(mode):
    assert failures(compiled(**MODES[mode]), SIZES["small"], WRITES) == []


@pytest.mark.parametrize("by_python", [False, True], ids=["C++", "Python"])
def test_a_raw_write_is_found_within_64_calls(by_python, monkeypatch, caplog):
    """Of one element, wherever it is; the warning says so."""
    if by_python:
        monkeypatch.setattr(weight_reader, "reader", lambda: None)
    monkeypatch.setattr(decisions, "warn_once", decisions.log.warning)
    caplog.set_level("WARNING", "ipex_inductor")
    fn, model, x = compiled(), Net(512).eval(), torch.randn(4, 512)
    for place in (0, 100_003, 512 * 512 - 1):
        agree(fn, model, x, "before")
        ctypes.memset(model.up.weight.data_ptr() + 4 * place, 0x42, 4)  # 48.5
        for _ in range(64):
            fn(model, x)
            if "torch does not see" in caplog.text:
                break
        else:
            pytest.fail(f"element {place} was not found within 64 calls")
        agree(fn, model, x, "behind the warning")
        caplog.clear()


def test_without_a_sample_the_write_would_be_missed(monkeypatch):
    """The sample is what finds a write that nothing notices."""
    monkeypatch.setattr(weight_results, "_hashes", lambda weight, watched: None)
    found = failures(compiled(), SIZES["large"], ["raw pointer", "custom operator"])
    assert len(found) == 2


def test_reading_is_no_write(monkeypatch):
    """Nothing is computed again for what was read through an alias, an array or a storage."""
    fn, model, x = compiled(), Net(512).eval(), torch.randn(4, 512)
    agree(fn, model, x, "at first")
    runs = []
    run = derived.Program.run
    monkeypatch.setattr(
        derived.Program, "run", lambda self, weights: runs.append(1) or run(self, weights)
    )
    for read in (
        lambda p: p.data.norm(),
        lambda p: p.detach().numpy().sum(),
        lambda p: torch.from_dlpack(p.detach()).sum(),
        lambda p: bytes(p.untyped_storage()[:4]),
        lambda p: copy.deepcopy(p),
        lambda p: torch.save(p, io.BytesIO()),
    ):
        for p in model.parameters():
            read(p)
        agree(fn, model, x, "read")
    model.to("cpu").float()  # sets `data` to what it is
    agree(fn, model, x, "moved nowhere")
    assert runs == []
