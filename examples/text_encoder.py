"""Encode texts with BERT of Hugging Face transformers, compiled by backend "ipex" in bfloat16.

    python examples/text_encoder.py [--quick]

The configuration is made here and weights are random, so nothing is downloaded. Prints the error
of eager and of compiled mode against float32, the rules that were applied, and times. Needs
`pip install "ipex-inductor[demo]"`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import ipex_inductor


class Encoder(nn.Module):
    """BERT and a mean over the tokens: one vector a text."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return vectors of length 1, of the tokens that `mask` keeps."""
        states = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        kept = mask.unsqueeze(-1).to(states.dtype)
        return nn.functional.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)


def measure_ms(model: Callable[..., Tensor], inputs: tuple[Tensor, ...], calls: int) -> float:
    """Return the median time of a call in milliseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        model(*inputs)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    """Compile the encoder, compare both modes with float32, and time them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two thin layers")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 256}
    config = BertConfig(vocab_size=1000, num_attention_heads=4, **sizes) if quick else BertConfig()
    tokens = torch.randint(config.vocab_size, (2, 16 if quick else 128))
    mask = torch.ones_like(tokens)
    mask[1, tokens.shape[1] // 2 :] = 0  # the second text is half as long
    encoder = Encoder(config).eval()
    with torch.no_grad():
        exact = encoder(tokens, mask)
        encoder.bfloat16()
        compiled = torch.compile(encoder, backend="ipex")
        for name, model in (("eager", encoder), ("compiled", compiled)):
            error = (model(tokens, mask).float() - exact).abs().max().item()
            print(f"{name}: largest difference from float32 {error:.1e}")
        print("rules applied:", ipex_inductor.explain(encoder, tokens, mask).fired())
        calls = 5 if quick else 30
        before = measure_ms(encoder, (tokens, mask), calls)
        after = measure_ms(compiled, (tokens, mask), calls)
    print(f"eager {before:.1f} ms, compiled {after:.1f} ms: {before / after:.2f} times as fast")


if __name__ == "__main__":
    main()
