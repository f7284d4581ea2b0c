"""What several tests need: generated code without its comments, and models to compile."""

import io
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code


def code_of(fn, *args):
    """The code Inductor generated while `fn(*args)` ran: comments and file hashes removed."""
    _, sources = run_and_get_code(fn, *args)
    return [strip(source) for source in sources]


def strip(source):
    # Comments and the arguments of a backward carry names of graph nodes, which number all nodes
    # ever made; kernel files are named by the cache folder.
    lines = [line.split("#", 1)[0].rstrip() for line in source.splitlines()]
    text = re.sub(r"/[^\s'\"]*/", "", "\n".join(line for line in lines if line))
    for taken in re.findall(r"^ +(.*) = args$", text, re.MULTILINE):
        for number, name in enumerate(taken.split(", ")):
            text = re.sub(rf"\b{name}\b", f"argument{number}", text)
    return text


def pickled(value):
    """`value` saved whole and loaded again."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Mlp(nn.Module):
    """Linear, GELU, linear: the smallest model a rule of ours fires on."""

    def __init__(self, width=32, dtype=torch.float32):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Plain(nn.Module):
    """Nothing here is ours to improve: Inductor's code must come out unchanged."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(32, dtype=dtype))

    def forward(self, x):
        y = F.gelu(self.norm(x) * self.scale)
        return F.silu(y @ y.t() @ x).softmax(-1)
