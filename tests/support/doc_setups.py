"""What stands before blocks of the documentation that need more than a reader's machine has.

`RUN_IF` has reasons of blocks that run where something is there, `SETUPS` what a program makes
first for the others: a tiny model for one that is downloaded, a process group of one process, a
bundle that this machine packed.
"""

import torch

from support import sycl_device

RUN_IF = {
    "needs a GPU": torch.cuda.is_available,
    "needs the extra sycl-cpu": lambda: not sycl_device.why_not(),
}

SETUPS = {
    "downloads a model": """
import transformers

class AutoTokenizer:
    @staticmethod
    def from_pretrained(name):
        return lambda text, return_tensors: {"input_ids": torch.arange(1, 6)[None]}

class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(name, dtype):
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 64}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)
        return transformers.GPT2LMHeadModel(config).to(dtype)

transformers.AutoTokenizer = AutoTokenizer
transformers.AutoModelForCausalLM = AutoModelForCausalLM
""",
    "needs several processes": """
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        parts = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(*parts)])

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = Layers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    "needs a bundle of this machine": """
import subprocess, sys, torch

with torch.no_grad():
    torch.compile(torch.nn.Linear(8, 4), backend="ipex")(torch.randn(2, 8))
for command in (
    "trust new builder", "pack model.ipexbundle --key builder.key", "trust add builder builder.pub"
):
    subprocess.run([sys.executable, "-m", "ipex_inductor", "cache", *command.split()], check=True)
""",
}


def code_to_run(text: str, reason: str) -> str | None:
    """Return a block with what stands before it, or None if it cannot run here.

    Args:
        text: the block.
        reason: why it does not run everywhere, "" if it does.
    """
    if reason in SETUPS:
        return SETUPS[reason] + text
    return text if RUN_IF.get(reason, lambda: not reason)() else None
