"""Calibrating and converting hold the model and temporaries of a layer: by allocations, and RSS."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ipex_inductor import quantization

LAYERS = 12
NOTHING = nullcontext()
MOST = 0.2  # of the model's memory, beside the model


class Counter(TorchDispatchMode):
    """Sums storages that are made inside and alive, by weak references to them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {storage_of(t) for t in [*args, *(kwargs or {}).values()] if is_counted(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if is_counted(tensor) and storage_of(tensor) not in known:
                storage = tensor.untyped_storage()
                self.alive[storage_of(tensor)] = storage._weak_ref(), storage.nbytes()
        for key, (reference, _) in [*self.alive.items()]:
            if torch.UntypedStorage._expired(reference):
                torch.UntypedStorage._free_weak_ref(reference)
                del self.alive[key]
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def is_counted(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    )


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def make_net(width: int) -> nn.Module:
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*layers).eval()


def by_summary(mapping: object) -> object:
    """Return a function that prepares, calibrates and converts by the API since IPEX 1.12."""

    def quantize(model: nn.Module, x: Tensor, counter: Any = NOTHING) -> nn.Module:
        prepared = quantization.prepare(model, mapping, example_inputs=x)
        with counter:
            for _ in range(2):
                prepared(x)
            return quantization.convert(prepared)

    return quantize


def by_conf(model: nn.Module, x: Tensor) -> nn.Module:
    """Calibrate and convert by the API of IPEX 1.9 to 1.11."""
    conf = quantization.QuantConf()
    with quantization.calibrate(conf):
        model(x)
    return quantization.convert(model, conf, x)


def dynamically(model: nn.Module, x: Tensor, counter: Any = NOTHING) -> nn.Module:
    """Convert for dynamic quantization."""
    mapping = quantization.default_dynamic_qconfig_mapping
    with counter:
        return quantization.convert(quantization.prepare(model, mapping))


WAYS = {
    "prepare": by_summary(quantization.default_static_qconfig_mapping),
    "SmoothQuant": by_summary(quantization.get_smooth_quant_qconfig_mapping()),
    "QuantConf": by_conf,
    "dynamic": dynamically,
}


# A mode of torch's stands in the way of capturing a model, which is part of a block of `calibrate`.
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"QuantConf"}))
def test_nothing_as_large_as_the_model_is_made(way: str) -> None:
    model, x = make_net(768), torch.randn(4, 768)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        WAYS[way](make_net(8), torch.randn(4, 8))  # first calls register what lasts
        counter = Counter()
        WAYS[way](model, x, counter)
    # A histogram's range is searched in tables of 128 candidates and 2048 bins in float64.
    assert counter.peak <= MOST * size + 4 * 128 * 2048 * 8 < 0.6 * size


CHILD = """
import gc, sys, torch
from quantization import test_memory as memory
torch.set_num_threads(1)

def resident(name):
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

way = memory.WAYS[sys.argv[1]]
with torch.no_grad():
    way(memory.make_net(64), torch.randn(4, 64))
    model, x = memory.make_net(2048), torch.randn(4, 2048)
    model(x)
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = resident("VmRSS")
    quantized = way(model, x)
    print(resident("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize("way", WAYS)
def test_the_peak_is_a_fifth_more_than_the_model(way: str) -> None:
    """Of 201 MB of linear layers, in a process of its own."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", CHILD, way]
    words = {"cwd": tests, "check": True, "capture_output": True, "text": True}
    peak, size = map(int, subprocess.run(command, **words).stdout.split())
    assert size > 200e6
    assert peak <= MOST * size
