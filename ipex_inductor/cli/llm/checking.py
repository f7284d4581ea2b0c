"""Logits of a variant beside those of the eager model in fp32, for the same tokens.

The reference computes the tokens of a prompt and of some that follow in one call without a cache.
A variant decodes them one by one, and a processor of logits forces each token. So prompts, caches
and decoding are all checked.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ipex_inductor.ops.quant.weight_only import dequantize_activations
from ipex_inductor.quantization.weight_only import WeightOnlyLinear

CHECKED = 8  # tokens that are decoded after the prompt
FARTHER = 1.5  # times eager's error in the same dtype; other kernels add up in another order
# fp32 sums of thousands of terms in another order differ by 1e-6 in a layer, and dozens of layers
# add to that.
FP32_LIMIT = 1e-4


@dataclass(frozen=True)
class Reference:
    """Tokens, exact logits, and the error that a variant may have.

    `tokens` is [batch, prompt + CHECKED], `logits` [batch, CHECKED + 1, words] in fp32.
    """

    tokens: Tensor
    logits: Tensor
    limit: float

    def error(self, logits: Tensor) -> float:
        """Return the norm of the error of logits, relative to the norm of the exact ones."""
        difference = (logits.float().cpu() - self.logits).norm()
        return float(difference / self.logits.norm())

    def save(self, file: str) -> None:
        """Write the reference to a file .npz, which programs without torch read too."""
        np.savez(file, tokens=self.tokens.numpy(), logits=self.logits.numpy(), limit=self.limit)

    @classmethod
    def load(cls, file: str) -> "Reference":
        """Return the reference of a file that `save` wrote."""
        with np.load(file) as arrays:
            tokens, logits = (torch.from_numpy(arrays[name]) for name in ("tokens", "logits"))
            return cls(tokens, logits, float(arrays["limit"]))


def draw_tokens(words: int, batch: int, prompt: int) -> Tensor:
    """Return random tokens [batch, prompt + CHECKED], the same ones in each process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(words, (batch, prompt + CHECKED), generator=generator)


@torch.no_grad()
def make_reference(model: Any, tokens: Tensor, dtype: torch.dtype) -> Reference:
    """Return the logits of `model` computed in fp32, and the limit for variants in `dtype`.

    Args:
        model: in eval mode, its weights in `dtype` or quantized. It is changed.
        tokens: of `draw_tokens`.
        dtype: that variants compute in.
    """
    replace_quantized(model)
    near = None if dtype is torch.float32 else compute_logits(model, tokens)
    exact = compute_logits(model.float(), tokens)
    reference = Reference(tokens, exact, FP32_LIMIT)
    if near is None:
        return reference
    return Reference(tokens, exact, FARTHER * reference.error(near))


def compute_logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits behind the prompt and each token after it, in fp32 on the CPU."""
    device = next(model.parameters()).device
    output = model(tokens.to(device), use_cache=False, logits_to_keep=CHECKED + 1)
    logits: Tensor = output.logits[:, -CHECKED - 1 :]
    return logits.float().cpu()


def replace_quantized(model: nn.Module) -> None:
    """Replace layers on quantized weights by plain ones on what those stand for.

    Where GEMMs are computed in int8, the inputs are rounded as the kernels round them. So the error
    of that is in the exact logits too.
    """
    dtype = next(p.dtype for p in model.parameters())
    for name, layer in list(model.named_modules()):
        if isinstance(layer, WeightOnlyLinear):
            model.set_submodule(name, _plain_layer(layer, dtype))


def _plain_layer(layer: WeightOnlyLinear, dtype: torch.dtype) -> nn.Linear:
    with torch.device("meta"):
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    plain.weight = nn.Parameter(layer.dequantize().to(dtype), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    if layer.compute == "int8":
        size = layer.group_size
        plain.register_forward_pre_hook(
            lambda module, args: (dequantize_activations(args[0], size).to(args[0].dtype),)
        )
    return plain


class ForcedTokens:
    """A processor of logits that keeps them and lets `generate` choose the given tokens.

    Args:
        tokens: [batch, steps], chosen one after the other; the last one again after them.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.logits = tokens, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores that are 0 for the next token and minus infinity for all others."""
        step = min(len(self.logits), self.tokens.shape[1] - 1)
        self.logits.append(scores.float().cpu())
        chosen = self.tokens[:, step : step + 1].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def measure_error(generate: Any, reference: Reference, device: str, new: int) -> float:
    """Return the error of the logits with which `generate` decodes the reference's tokens.

    Args:
        generate: of a variant, called with a prompt and a number of tokens.
        reference: of the same model.
        device: of the prompt.
        new: tokens of a timed generation: as many again take no other cache, and no other graph.
    """
    prompt = reference.tokens[:, :-CHECKED].to(device)
    forced = ForcedTokens(reference.tokens[:, -CHECKED:])
    generate(prompt, max(new, CHECKED + 1), logits_processor=[forced])
    return reference.error(torch.stack(forced.logits[: CHECKED + 1], 1))


def beam_limit(reference: Reference) -> float:
    """Return how far scores of a beam search may be off: four times the error of a logit."""
    return 4 * reference.limit * float(reference.logits.square().mean().sqrt())


@torch.no_grad()
def measure_beam_error(model: Any, output: Any, prompt: int) -> float:
    """Return how far scores of a beam search are off those of the same texts in one call each.

    The scores are mean log-probabilities of the new tokens. A cache whose beams were exchanged in
    a wrong way gives others.

    Args:
        model: the variant.
        output: of `generate` with scores.
        prompt: number of tokens before the new ones.
    """
    tokens = output.sequences
    logits = type(model).forward(model, tokens, use_cache=False).logits[:, prompt - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, prompt:, None])
    scores = chosen.squeeze(-1).mean(1)
    return float((scores - output.sequences_scores).abs().max())
