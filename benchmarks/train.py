"""Compare training steps on one GPU: eager, Inductor and backend `ipex`.

    python -m benchmarks train [--models resnet50 efficientnet_b0 vit_b_16 bert gpt2-medium]
        [--seconds S] [--rules WORDS] [--kernels N] [--json FILE]
    python -m benchmarks train --check [--models small] [--batch N]

ResNet-50 and EfficientNet-B0 with 128 images, ViT-B/16 with 64 (channels-last), BERT-base with
32 x 384 tokens, GPT-2-medium with 8 x 1024; forward and backward under bf16 autocast, AdamW in
fp32, no dropout, gradients set to None. Eager and Inductor use torch's fused AdamW, `ipex` its
fused step. The first gradients of the whole batch are checked against fp64 before timing: a peer
that is farther off than eager may be is printed as wrong, without a speed. Times are milliseconds
of a whole step between events, launches included, a block of steps at a time with the peers in
turns. The sum of kernel times is printed too, as a slow host does not change it. `--kernels N`
lists the N that take most of it.

`--check` ends after the gradients, and works without a GPU; model `small`, a few layers, is meant
for that.
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
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import ipex_inductor
from common.damped_resnet import damp_residual_branches
from common.gpu_peers import append_row, describe_run, time_in_turns
from ipex_inductor.reporting import decisions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST: dict[str, Any] = {"memory_format": torch.channels_last}
BATCHES = {
    "resnet50": 128,
    "efficientnet_b0": 128,
    "vit_b_16": 64,
    "bert": 32,
    "gpt2-medium": 8,
    "small": 16,
}
LIBRARIES = {
    **dict.fromkeys(("resnet50", "efficientnet_b0", "vit_b_16"), "torchvision"),
    **dict.fromkeys(("bert", "gpt2-medium"), "transformers"),
}
# How far gradients may be from fp64's: so many times as far as eager's under autocast, and what
# the demo grants 16 bits besides (`demo_measure.error_limit`, which has three times).
ERRORS, BESIDES = 1.5, 1e-3


@dataclass(frozen=True)
class Case:
    """A model in fp32 in train mode, and what its loss is of.

    In fp64 the batch goes through it in so many parts, where no layer looks at two of its rows.
    """

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    parts: int = 1


def image_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the cross entropy of classes."""
    images, classes = inputs
    return nn.functional.cross_entropy(model(images).float(), classes)


def text_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return transformers' loss; tokens are their own labels."""
    loss: Tensor = model(inputs[0], labels=inputs[0], return_dict=False)[0]
    return loss


def small() -> nn.Module:
    """Return one or two layers of each kind of a ResNet."""
    layers: list[nn.Module] = []
    for channels, results in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(channels, results, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(results), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def image_case(name: str, batch: int) -> Case:
    """Return a network of images; batch norms look at all of them at once."""
    if name == "small":
        made, pixels, classes = small(), 32, 10
    else:
        import torchvision

        # EfficientNet drops units and layers at random unless it is told not to.
        words = {} if name == "resnet50" else {"dropout": 0.0}
        words |= {"stochastic_depth_prob": 0.0} if name == "efficientnet_b0" else {}
        made = torchvision.models.get_model(name, weights=None, **words)
        if name == "vit_b_16":  # its head is initialized to zeros, so no gradient would pass it
            nn.init.normal_(made.heads.head.weight, std=0.02)
        made, pixels, classes = damp_residual_branches(made), 224, 1000
    model: nn.Module = made.to(DEVICE).to(**LAST).train()
    x = torch.randn(batch, 3, pixels, pixels, device=DEVICE).to(**LAST)
    return Case(name, model, (x, torch.randint(classes, (batch,), device=DEVICE)), image_loss)


def text_case(name: str, batch: int) -> Case:
    """Of BERT-base and GPT-2-medium, a text at a time in fp64."""
    import transformers

    kinds: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
        "bert": (
            transformers.BertConfig,
            transformers.BertForMaskedLM,
            {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            384,
        ),
        "gpt2-medium": (
            transformers.GPT2Config,
            transformers.GPT2LMHeadModel,
            {"n_embd": 1024, "n_layer": 24, "n_head": 16, "use_cache": False}
            | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            1024,
        ),
    }
    config, kind, values, tokens = kinds[name]
    words = kind(config(**values)).to(DEVICE).train()
    x = torch.randint(words.config.vocab_size, (batch, tokens), device=DEVICE)
    return Case(name, words, (x,), text_loss, parts=batch)


def cases(names: list[str], batch: int | None) -> Iterator[Case]:
    """Yield the cases, made one after the other."""
    for name in names:
        torch.manual_seed(0)
        made = text_case if LIBRARIES.get(name) == "transformers" else image_case
        yield made(name, batch or BATCHES[name])


def contestant(
    peer: str, case: Case, rules: str
) -> tuple[nn.Module, Callable[[], Tensor], Callable[[], None]]:
    """The peer's own copy of the model, its forward and backward, and its whole step."""
    model = copy.deepcopy(case.model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if peer == "ours":
        ipex_inductor.optim.fuse_step(adamw)
    backends: dict[str, dict[str, Any]] = {
        "inductor": {},
        "ours": {"backend": "ipex", "options": {"strict": True, "rules": rules}},
    }
    run: Any = model if peer == "eager" else torch.compile(model, **backends[peer])

    def gradients() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = case.loss(run, case.inputs)
        loss.backward()
        return loss.detach()

    def step() -> None:
        gradients()
        adamw.step()
        adamw.zero_grad()

    return model, gradients, step


def profile_kernels(step: Callable[[], None], count: int) -> tuple[float, list[str]]:
    """Return the milliseconds that kernels take in a step, and a line for each of the longest.

    Args:
        step: A training step.
        count: The number of lines.
    """
    steps = 3
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spent = [
        (e.self_device_time_total / steps / 1e3, e.count / steps, e.key)
        for e in seen.key_averages()
    ]
    spent.sort(reverse=True)
    lines = [f"{ms:8.3f} ms {calls:4.0f} calls  {name[:150]}" for ms, calls, name in spent[:count]]
    return sum(ms for ms, _, _ in spent), lines


class Doubled(TorchFunctionMode):
    """Losses take `.float()` of what they are given; fp64 stays what it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype is torch.double:
            return args[0]
        return func(*args, **(kwargs or {}))


def exact_gradients(case: Case) -> list[Tensor]:
    """In fp64, of the whole batch."""
    model = copy.deepcopy(case.model).double()
    inputs = [x.double() if x.is_floating_point() else x for x in case.inputs]
    for part in zip(*(x.chunk(case.parts) for x in inputs), strict=True):
        with Doubled():
            loss = case.loss(model, part)
        assert loss.dtype is torch.double
        (loss / case.parts).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def distance(model: nn.Module, exact: list[Tensor]) -> float:
    """Return the relative distance of all gradients together."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    off = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
    return float((off / sum(b.square().sum() for b in exact)) ** 0.5)


def measure(options: argparse.Namespace, case: Case, about: dict[str, str]) -> bool:
    """Print a row for each peer; return whether all of them are right."""
    exact = exact_gradients(case)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    torch.compiler.reset()
    for peer in options.peers:
        decisions.clear()
        row = rows[peer] = {"model": case.name, "shape": [*case.inputs[0].shape], "peer": peer}
        model, gradients, step = contestant(peer, case, options.rules)
        begin = time.monotonic()
        try:
            row["loss"] = float(gradients())
            row["gradients' error"], row["held against"] = distance(model, exact), "fp64"
            if not options.check:
                step()
                torch.cuda.synchronize()
                row["first step, s"] = round(time.monotonic() - begin, 2)
                total, lines = profile_kernels(step, options.kernels)
                row["kernels, ms"] = round(total, 3)
                for line in lines:
                    print(f"{peer}: {line}", flush=True)
                steps[peer] = step
        except Exception as error:  # one peer's fault is not the others'
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
        reports = decisions.reports()
        row["fired"] = sorted({e.subject for r in reports for e in r.events if e.kind == "fired"})
    allowed = ERRORS * rows["eager"].get("gradients' error", 0.0) + BESIDES
    for peer, row in rows.items():
        if row.get("gradients' error", 0.0) > allowed:
            row["failed"] = f"wrong: gradients may be off by {allowed}"
            steps.pop(peer, None)
    times = time_in_turns(steps, options.seconds) if steps else {}
    for peer, row in rows.items():
        if peer in times:
            row["median, ms"] = round(statistics.median(times[peer]), 3)
            row["minimum, ms"] = round(min(times[peer]), 3)
        append_row(options, about, row)
    return not any("failed" in row for row in rows.values())


def main() -> None:
    """All cases; ends with 1 if any peer failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*LIBRARIES], choices=BATCHES)
    parser.add_argument("--peers", nargs="+", default=["eager", "inductor", "ours"])
    parser.add_argument("--batch", type=int, help="images or texts")
    parser.add_argument("--check", action="store_true", help="hold gradients, and time nothing")
    parser.add_argument("--seconds", type=float, default=6, help="of timing a model")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels of a peer")
    parser.add_argument("--rules", default="", help="of ours, as the option: -relu-mask")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    if "eager" not in options.peers:
        parser.error("eager is what the others are held against")
    if DEVICE == "cpu" and not options.check:
        parser.error("without a GPU there is --check alone")
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    libraries = sorted({LIBRARIES[name] for name in options.models if name in LIBRARIES})
    about = describe_run(*libraries, device=DEVICE)
    print(json.dumps(about), flush=True)
    right = True
    for case in cases(options.models, options.batch):
        right &= measure(options, case, about)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
