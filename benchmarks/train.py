"""Training steps on one GPU, side by side in one run: eager, Inductor, ours.

    python benchmarks/train.py [--models resnet50 bert gpt2-medium] [--seconds S] [--json FILE]

ResNet-50 with 128 images (channels-last), BERT-base with 32 times 384 words, GPT-2-medium with 8
times 1024; forward and backward under bf16 autocast, AdamW in fp32, no dropout, gradients set to
None. Eager and Inductor step with torch's fused AdamW, ours with the fused step. Before any is
timed its first gradients are held against the same model's without autocast, in fp32 without TF32:
who is farther off than eager may be is printed as wrong, without a speed. Milliseconds of a whole
step between events, as the host launches it: a block of steps at a time, peers in turns. Beside
them the sum of its kernels, which a slow host leaves as it is.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
import transformers
from damped import damped
from gpu_peers import keep, known, raced
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ipex_inductor
from ipex_inductor import decisions

LAST: dict[str, Any] = {"memory_format": torch.channels_last}
# How far gradients may be from fp32's: so many times as far as eager's under autocast.
ERRORS = 1.5


@dataclass(frozen=True)
class Case:
    """A model in fp32 in train mode, and what its loss is of."""

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def of_images(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of classes."""
    images, classes = inputs
    return nn.functional.cross_entropy(model(images).float(), classes)


def of_words(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """What transformers computes as its loss; words are their own labels."""
    loss: Tensor = model(inputs[0], labels=inputs[0], return_dict=False)[0]
    return loss


def cases(names: list[str]) -> Iterator[Case]:
    """Made one after the other, on the GPU."""
    for name in names:
        torch.manual_seed(0)
        if name == "resnet50":
            images = damped(torchvision.models.resnet50(weights=None)).cuda().to(**LAST).train()
            x = torch.randn(128, 3, 224, 224, device="cuda").to(**LAST)
            yield Case(name, images, (x, torch.randint(1000, (128,), device="cuda")), of_images)
            continue
        kinds: dict[str, tuple[Any, Any, dict[str, Any], tuple[int, int]]] = {
            "bert": (
                transformers.BertConfig,
                transformers.BertForMaskedLM,
                {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
                (32, 384),
            ),
            "gpt2-medium": (
                transformers.GPT2Config,
                transformers.GPT2LMHeadModel,
                {"n_embd": 1024, "n_layer": 24, "n_head": 16, "use_cache": False}
                | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
                (8, 1024),
            ),
        }
        config, kind, values, shape = kinds[name]
        words = kind(config(**values)).cuda().train()
        x = torch.randint(words.config.vocab_size, shape, device="cuda")
        yield Case(name, words, (x,), of_words)


def contestant(peer: str, case: Case) -> tuple[nn.Module, Callable[[], Tensor], Callable[[], None]]:
    """The peer's own copy of the model, its forward and backward, and its whole step."""
    model = copy.deepcopy(case.model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if peer == "ours":
        ipex_inductor.optim.fuse_step(adamw)
    backends: dict[str, dict[str, Any]] = {
        "inductor": {},
        "ours": {"backend": "ipex", "options": {"strict": True}},
    }
    run: Any = model if peer == "eager" else torch.compile(model, **backends[peer])

    def gradients() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = case.loss(run, case.inputs)
        loss.backward()
        return loss.detach()

    def step() -> None:
        gradients()
        adamw.step()
        adamw.zero_grad()

    return model, gradients, step


def kernels(step: Callable[[], None]) -> float:
    """Milliseconds that the device works for a step."""
    steps = 3
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) / steps / 1e3


def exact_gradients(case: Case) -> list[Tensor]:
    """In fp32, TF32 off."""
    model = copy.deepcopy(case.model)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        case.loss(model, case.inputs).backward()
    finally:
        torch.backends.cudnn.allow_tf32 = True
    return [p.grad for p in model.parameters() if p.grad is not None]


def distance(model: nn.Module, exact: list[Tensor]) -> float:
    """Of all gradients together, relative."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    off = sum((a - b).double().square().sum() for a, b in zip(found, exact, strict=True))
    return float((off / sum(b.double().square().sum() for b in exact)) ** 0.5)


def measure(options: argparse.Namespace, case: Case, about: dict[str, str]) -> bool:
    """A row for each peer. Whether all of them are right."""
    exact = exact_gradients(case)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    torch.compiler.reset()
    for peer in options.peers:
        decisions.clear()
        row = rows[peer] = {"model": case.name, "shape": [*case.inputs[0].shape], "peer": peer}
        model, gradients, step = contestant(peer, case)
        begin = time.monotonic()
        try:
            row["loss"] = float(gradients())
            row["gradients' error"] = distance(model, exact)
            step()
            torch.cuda.synchronize()
            row["first step, s"] = round(time.monotonic() - begin, 2)
            row["kernels, ms"] = round(kernels(step), 3)
            steps[peer] = step
        except Exception as error:  # one peer's fault is not the others'
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
        reports = decisions.reports()
        row["fired"] = sorted({e.subject for r in reports for e in r.events if e.kind == "fired"})
    allowed = ERRORS * rows["eager"]["gradients' error"]
    for peer, row in rows.items():
        if row.get("gradients' error", 0.0) > allowed:
            row["failed"] = f"wrong: gradients may be off by {allowed}"
            steps.pop(peer, None)
    times = raced(steps, options.seconds)
    for peer, row in rows.items():
        if peer in times:
            row["median, ms"] = round(statistics.median(times[peer]), 3)
            row["minimum, ms"] = round(min(times[peer]), 3)
        keep(options, about, row)
    return not any("failed" in row for row in rows.values())


def main() -> None:
    """All cases; ends with 1 if any peer failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["resnet50", "bert", "gpt2-medium"])
    parser.add_argument("--peers", nargs="+", default=["eager", "inductor", "ours"])
    parser.add_argument("--seconds", type=float, default=6, help="of timing a model")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    about = known("train.py", "torchvision", "transformers")
    print(json.dumps(about), flush=True)
    right = True
    for case in cases(options.models):
        right &= measure(options, case, about)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
