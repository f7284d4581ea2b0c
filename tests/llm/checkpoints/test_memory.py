"""Loading holds the final model and one layer's tensors, measured by allocations and by RSS."""

import json
import os
import subprocess
import sys

import pytest
import torch

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors writes the checkpoints")

pytestmark = pytest.mark.unit

BLOCKS, WIDTH = 8, 2048

CHILD = """
import resource, sys, torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from ipex_inductor.llm.checkpoints import load_quantized

class Counter(TorchDispatchMode):
    # Sum storages that are alive, by weak references to them.
    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = {}, 0, 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage.data_ptr():
                    self.alive[storage.data_ptr()] = storage._weak_ref(), storage.nbytes()
        for key, (ref, size) in [*self.alive.items()]:
            if torch.UntypedStorage._expired(ref):
                torch.UntypedStorage._free_weak_ref(ref)
                del self.alive[key]
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result

torch.set_num_threads(1)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear({width}, {width}, bias=False) for _ in range({blocks})))
load_quantized(nn.Sequential(nn.Linear(64, 64, bias=False)), sys.argv[1] + "/warm")  # imports
def resident():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
before = resident()
if sys.argv[2] == "count":
    with Counter() as counter:
        load_quantized(model, sys.argv[1])
    peak = counter.peak
else:
    load_quantized(model, sys.argv[1])
    peak = resident() - before
final = sum(b.nbytes for b in model.buffers())
print(peak, final)
"""


def write(folder, blocks, width):
    tensors = {}
    for number in range(blocks):
        words = torch.randint(-(2**31), 2**31 - 1, (width // 8, width), dtype=torch.int32)
        tensors[f"{number}.qweight"] = words
        tensors[f"{number}.qzeros"] = torch.zeros(width // 32, width // 8, dtype=torch.int32)
        tensors[f"{number}.scales"] = torch.rand(width // 32, width).half()
        # Act-order needs the most: nibbles are unpacked, sorted and packed again.
        tensors[f"{number}.g_idx"] = (torch.randperm(width) // 32).int()
    safetensors.save_file(tensors, folder / "model.safetensors")
    config = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    (folder / "quantize_config.json").write_text(json.dumps(config))


@pytest.mark.sampled("count")
@pytest.mark.parametrize("how", ["count", "resident"])
def test_the_peak_is_the_final_size_and_one_layer(how, tmp_path):
    torch.manual_seed(0)
    write(tmp_path, BLOCKS, WIDTH)
    (tmp_path / "warm").mkdir()
    write(tmp_path / "warm", 1, 64)
    code = CHILD.replace("{width}", str(WIDTH)).replace("{blocks}", str(BLOCKS))
    command = [sys.executable, "-c", code, str(tmp_path), how]
    # glibc then returns freed blocks at once; else resident pages vary by tens of MB.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    peak, final = map(int, output.split())
    one_layer = WIDTH * WIDTH * 4  # in fp32
    assert peak <= final + one_layer
    if how == "count":
        assert peak >= final
    print(peak, final)
