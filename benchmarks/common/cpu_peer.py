"""Program for one peer of `benchmarks/cpu.py`: prepares one model, then runs on request.

    python benchmarks/common/cpu_peer.py PEER MODEL DTYPE BATCH

Needs torch, transformers and the peer's packages; this project only for peers `ipex` and
`ipex-package`, so that it also runs in the environment of an unsupported torch. Prints one JSON
line when it is ready. For each input line (a number of calls) it prints one with the wall
milliseconds and the processor milliseconds of so many calls.
"""

import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Call = Callable[[], Tensor]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INT8 = "int8"  # a model in fp32, quantized by the peer: statically, after some random batches
CALIBRATIONS = 8
# The error of int8 that passes, relative to fp64: peers have 2 to 4 %, wrong kernels over 100 %.
INT8_LIMIT = 0.1
TOKENS, PIXELS = 128, 224
CHECKED = 2  # of a batch, so many are computed in fp64
PICTURE: dict[str, Any] = {"num_labels": 1000}
BASIC = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resnet50": ("ResNetConfig", "ResNetForImageClassification", PICTURE),
    "bert": ("BertConfig", "BertModel", {}),
    "vit": ("ViTConfig", "ViTForImageClassification", PICTURE),
    "gpt2-decode": ("GPT2Config", "GPT2LMHeadModel", {}),
    "resnet18": ("ResNetConfig", "ResNetForImageClassification", {**PICTURE, **BASIC}),
    "regnet": ("RegNetConfig", "RegNetForImageClassification", PICTURE),
    "mobilenet": ("MobileNetV2Config", "MobileNetV2ForImageClassification", PICTURE),
}
PLAIN = "-nchw"  # behind a name: images and weights as they are made, not channels-last


class Whole(nn.Module):
    """A model of one tensor: its logits, or its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """x: images [B, 3, 224, 224] or tokens [B, 128]."""
        return self.model(x, return_dict=False)[0]


class Decode(nn.Module):
    """One token behind a context whose keys and values are inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, *context: Tensor) -> Tensor:
        """token [B, 1]; a key and a value [B, heads, context, width] a layer -> logits."""
        cache = transformers.DynamicCache()
        for layer, (key, value) in enumerate(zip(context[::2], context[1::2], strict=True)):
            cache.update(key, value, layer)
        return self.model(token, past_key_values=cache, return_dict=False)[0]


def make_model(asked: str, dtype: torch.dtype, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model, in eval mode with random weights, and its inputs."""
    torch.manual_seed(0)
    name = asked.removesuffix(PLAIN)
    config_name, class_name, changes = MODELS[name]
    config = getattr(transformers, config_name)(**changes)
    model = getattr(transformers, class_name)(config).eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):  # as after training: 0 and 1 hide a wrong folding
            nn.init.uniform_(part.weight, 0.35, 1.05)
            nn.init.normal_(part.bias, 0, 0.3)
            part.running_mean = torch.randn(part.num_features) * 0.3
            part.running_var = torch.rand(part.num_features) + 0.5
        if isinstance(part, nn.Conv2d) and asked.endswith(PLAIN):  # or some results vanish
            nn.init.kaiming_normal_(part.weight)
    model = model.to(dtype)
    if name == "gpt2-decode":
        shape = (batch, config.n_head, TOKENS, config.n_embd // config.n_head)
        context = [torch.randn(shape).to(dtype) for _ in range(2 * config.n_layer)]
        return Decode(model).eval(), (torch.randint(0, config.vocab_size, (batch, 1)), *context)
    if config_name == "BertConfig":
        return Whole(model).eval(), (torch.randint(0, config.vocab_size, (batch, TOKENS)),)
    image = torch.randn(batch, 3, PIXELS, PIXELS).to(dtype)
    if asked.endswith(PLAIN):
        return Whole(model).eval(), (image,)
    if name == "resnet50":
        model = model.to(memory_format=torch.channels_last)
    return Whole(model).eval(), (image.to(memory_format=torch.channels_last),)


def eager(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Return the eager call."""
    return lambda: model(*inputs)


def ours(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Compile by backend `ipex` with max-autotune; any fallback is an error."""
    run = torch.compile(model, backend="ipex", options={"mode": "max-autotune", "strict": True})
    return lambda: run(*inputs)


def packaged(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Load a packaged model as a server does: no Dynamo, no guards."""
    import ipex_inductor

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.ipexbundle")
        ipex_inductor.package(model, inputs, path, mode="max-autotune")
        run = ipex_inductor.load(path, weights=model.state_dict(), allow_unsigned=True)
    return lambda: run(*inputs)


def inductor_default(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Compile by Inductor with default options."""
    run = torch.compile(model)
    return lambda: run(*inputs)


def inductor(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Compile by Inductor with max-autotune and freezing, a global setting for Dynamo."""
    from torch._inductor import config

    config.freezing = True
    run = torch.compile(model, mode="max-autotune")
    return lambda: run(*inputs)


def optimize_for_ipex28(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    """Apply `ipex.optimize` of IPEX 2.8."""
    import intel_extension_for_pytorch as ipex

    dtype = next(model.parameters()).dtype
    shown: dict[str, Any] = {} if dtype == torch.float32 else {"dtype": dtype}
    if dtype == torch.bfloat16 and not ipex._C.onednn_has_bf16_support():
        shown |= {"weights_prepack": False}  # or it raises
    found: nn.Module = ipex.optimize(model, inplace=True, sample_input=inputs, **shown)
    return found


def ipex_trace(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """IPEX 2.8's graph mode by TorchScript: optimize, trace, freeze."""
    traced = torch.jit.freeze(
        torch.jit.trace(optimize_for_ipex28(model, inputs), inputs, strict=False)
    )
    return lambda: traced(*inputs)


def ipex_compile(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """IPEX 2.8's graph mode by TorchDynamo: optimize, torch.compile(backend="ipex")."""
    run = torch.compile(optimize_for_ipex28(model, inputs), backend="ipex")
    return lambda: run(*inputs)


def make_batches(inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Return random inputs for calibration, like `inputs`."""
    generator = torch.Generator().manual_seed(1)

    def like(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.empty_like(x).normal_(generator=generator)
        return torch.randint(0, int(x.max()) + 1, x.shape, generator=generator)

    return [tuple(map(like, inputs)) for _ in range(CALIBRATIONS)]


def quantized_ours(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Quantize by this package, and compile by backend `ipex`."""
    from ipex_inductor import quantization

    mapping = quantization.default_static_qconfig_mapping
    prepared = quantization.prepare(model, mapping, example_inputs=inputs)
    for batch in make_batches(inputs):
        prepared(*batch)
    return ours(quantization.convert(prepared), inputs)


def quantized_inductor(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Quantize by torchao's PT2E for x86, and compile by Inductor with freezing."""
    from torchao.quantization.pt2e import quantize_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(model, inputs, strict=True).module()
    prepared = quantize_pt2e.prepare_pt2e(exported, quantizer)
    for batch in make_batches(inputs):
        prepared(*batch)
    return inductor(quantize_pt2e.convert_pt2e(prepared), inputs)


def quantized_ipex28(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Quantize by IPEX 2.8, trace and freeze."""
    import intel_extension_for_pytorch as ipex

    mapping = ipex.quantization.default_static_qconfig_mapping
    prepared = ipex.quantization.prepare(model, mapping, example_inputs=inputs)
    for batch in make_batches(inputs):
        prepared(*batch)
    converted = ipex.quantization.convert(prepared)
    traced = torch.jit.freeze(torch.jit.trace(converted, inputs, strict=False))
    traced(*inputs)
    return lambda: traced(*inputs)


QUANTIZED = {
    "ipex": quantized_ours,
    "inductor": quantized_inductor,
    "ipex28-trace": quantized_ipex28,
}
PEERS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Call]] = {
    "eager": eager,
    "ipex": ours,
    "ipex-package": packaged,
    "inductor": inductor,
    "inductor-default": inductor_default,
    "ipex28-trace": ipex_trace,
    "ipex28-compile": ipex_compile,
}


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return the distance of `result` from `truth`, relative to the norm of `truth`."""
    return float((result.double() - truth).norm() / truth.norm())


def check_result(
    model: nn.Module, inputs: tuple[Tensor, ...], results: list[Tensor], quantized: bool
) -> dict[str, float]:
    """The worst error of `results` against fp64, and the largest that passes.

    By the rule of `torch._dynamo.utils.same`: RMSE <= m * RMSE(eager) + tol / 10, with m = 3 and
    tol = 1e-2 for 16-bit floats, m = 2 and tol = 1e-4 for fp32; here relative to the fp64 result.
    """
    few = tuple(x[:CHECKED] for x in inputs)
    wide = tuple(x.double() if x.is_floating_point() else x for x in few)
    near = relative_error(model(*few), truth := copy.deepcopy(model).double()(*wide))
    error = max(relative_error(result[:CHECKED], truth) for result in results)
    if quantized:
        return {"error": error, "limit": INT8_LIMIT}
    share, floor = (2, 1e-5) if results[0].dtype == torch.float32 else (3, 1e-3)
    return {"error": error, "limit": share * near + floor}


def cpu_flags() -> str:
    """What of this CPU the compilers and oneDNN go by."""
    with open("/proc/cpuinfo") as info:
        flags = next(line for line in info if line.startswith("flags")).split()
    told = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
    return " ".join(flag for flag in told if flag in flags)


def time_calls(call: Call, count: int) -> list[tuple[float, float]]:
    """Return milliseconds of each of `count` calls: of the clock and of processor time.

    A call before them finds others' data in the caches, and is not counted.
    """
    call()
    times = []
    for _ in range(count):
        begin, used = time.perf_counter(), time.process_time()
        call()
        spent = time.perf_counter() - begin, time.process_time() - used
        times.append((spent[0] * 1e3, spent[1] * 1e3))
    return times


@torch.no_grad()
def main() -> None:
    """Prepare, say so, and time what is asked until the input ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    peer, name, dtype, batch = sys.argv[1:5]
    quantized = dtype == INT8
    model, inputs = make_model(name, DTYPES.get(dtype, torch.float32), int(batch))
    begin = time.perf_counter()
    peers = {**PEERS, **QUANTIZED} if quantized else PEERS
    call = peers[peer](copy.deepcopy(model), inputs)
    results = [call().clone()]
    seconds = time.perf_counter() - begin
    results += [call().clone() for _ in range(3)]
    said = {
        "first_s": round(seconds, 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "flags": cpu_flags(),
        **check_result(model, inputs, results, quantized),
    }
    del model, results
    channel.write(json.dumps(said) + "\n")
    for line in sys.stdin:
        channel.write(json.dumps(time_calls(call, int(line))) + "\n")


if __name__ == "__main__":
    main()
