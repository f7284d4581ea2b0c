"""What several tests need: generated code without its comments, models to compile, patience."""

import copy
import io
import re
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import run_and_get_code

from ipex_inductor.passes.weights import upcast
from ipex_inductor.passes.weights.packing import onednn_dtypes


def code_of(fn, *args):
    """The code Inductor generated while `fn(*args)` ran: comments and file hashes removed."""
    _, sources = run_and_get_code(fn, *args)
    return [strip(source) for source in sources]


def compile_until(rule, monkeypatch, model, x):
    """`model(x)` is compiled until `rule` has rewritten its graph; nothing more is."""
    rewrite = rule.rewrite

    def rewrite_and_stop(graph, report):
        rewrite(graph, report)
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(rule, "rewrite", rewrite_and_stop)
        with pytest.raises(BackendCompilerFailed, match="InterruptedError"):
            torch.compile(model, backend="ipex", options={"strict": True})(x)


def no_farther_off_than_eager(fn, model, x):
    """Than twice as far, and a rounding; strides as its. `fn` is the model, compiled."""
    exact, eager = copy.deepcopy(model).double()(x.double()), model(x)
    result, unit = fn(x), exact.abs().max()
    allowed = 2 * (eager - exact).abs().max() / unit + torch.finfo(x.dtype).eps
    assert (result - exact).abs().max() / unit <= allowed
    assert result.stride() == eager.stride()


def has_kernels(dtype, training=False):
    """Whether rules fire on this CPU: where oneDNN has products in `dtype`, or fp32 is taken.

    Which is in inference alone (bf16 on AVX2).
    """
    return dtype in onednn_dtypes() or (not training and dtype in upcast.dtypes())


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


def wait_for(condition, seconds=120):
    """Return once `condition()` holds; `seconds` are for machines that are slow and busy."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} seconds"
        time.sleep(0.02)


def ended(pid):
    """Whether that process is gone, or waits only for its parent to ask how it ended."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


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
