"""Compare ResNet-50 in int8 on a GPU with the same model in bf16, both by backend `ipex`.

    python -m benchmarks int8_gpu [--models resnet50 bert] [--tune SECONDS] [--database FOLDER]
        [--kernels] [--json FILE]

ResNet-50 of torchvision in batches of 128, channels-last; BERT-base of transformers on 64 x 384
tokens, its int8 form under autocast to bf16. Weights are random, batch-norm statistics those of one
batch. Scales are of a small batch. Milliseconds are of the device: the lower quartile of 30 replays
of a captured graph. The error is relative to the model in fp32. `--tune` has missing records
measured first.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ipex_inductor.quantization import convert, default_static_qconfig_mapping, prepare

REPLAYS, CALIBRATIONS, KERNELS = 30, 3, 30
LAST: Any = torch.channels_last


class FirstResult(nn.Module):
    """A model of transformers that returns the first of its results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """Return the last hidden states of tokens [B, S]."""
        states: Tensor = self.model(words, return_dict=False)[0]
        return states


class InBf16(nn.Module):
    """A model under autocast to bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """Return the model's result."""
        with torch.autocast("cuda", torch.bfloat16):
            result: Tensor = self.model(words)
        return result


def make_resnet50() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, its input, and a small batch."""
    import torchvision

    model = torchvision.models.resnet50(weights=None).cuda().to(memory_format=LAST)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    images = [torch.randn(n, 3, 224, 224, device="cuda").to(memory_format=LAST) for n in (8, 128)]
    model.train()(images[0])
    return model.eval(), images[1], images[0][:4]


def make_bert() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, its input, and a small batch."""
    import transformers

    model = FirstResult(transformers.BertModel(transformers.BertConfig()).eval()).cuda()
    words = torch.randint(0, 30000, (64, 384), device="cuda")
    return model, words, words[:2]


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "resnet50": make_resnet50,
    "bert": make_bert,
}


def quantize(model: nn.Module, small: Tensor) -> nn.Module:
    """Return the model in int8, calibrated with a small batch."""
    mapping = default_static_qconfig_mapping
    prepared = prepare(copy.deepcopy(model), mapping, example_inputs=(small,), inplace=False)
    for _ in range(CALIBRATIONS):
        prepared(small)
    quantized: nn.Module = convert(prepared)
    return quantized


def time_replays(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return milliseconds of the device for a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        call(x)
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[REPLAYS // 4]


def print_kernels(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Print the kernels that take longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call(x)
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:KERNELS]:
        print(f"  {event.device_time_total:9.1f} us {event.count:3d} x {event.key[:110]}")


@torch.no_grad()
def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50"])
    parser.add_argument("--tune", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--database", default="", metavar="FOLDER")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of int8")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in given.models:
        torch.manual_seed(0)
        model, x, small = MODELS[name]()
        want = model(x)
        quantized = quantize(model, small)
        forms = {
            "bf16": copy.deepcopy(model).bfloat16(),
            "int8": quantized if x.is_floating_point() else InBf16(quantized),
        }
        for form, module in forms.items():
            torch.compiler.reset()
            options: dict[str, Any] = {"strict": True, "autotune_database": given.database}
            if given.tune and form == "int8":
                options |= {"autotune": "always", "autotune_budget_s": given.tune}
            call = torch.compile(module, backend="ipex", options=options)
            images = x.bfloat16() if form == "bf16" and x.is_floating_point() else x
            begin = time.perf_counter()
            result = call(images)
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
            row = {
                "model": name,
                "batch": len(x),
                "form": form,
                "ms": round(time_replays(call, images), 3),
                "first_s": round(first, 1),
                "error": round(float((result.float() - want).norm() / want.norm()), 4),
                **about,
                "date": datetime.now(UTC).date().isoformat(),
            }
            print(json.dumps(row), flush=True)
            if given.kernels and form == "int8":
                print_kernels(call, images)
            if given.json:
                with open(given.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
