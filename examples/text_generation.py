"""Generate text with `model.generate`, a static key-value cache and backend "ipex".

    python examples/text_generation.py [--quick]

A Llama with random weights writes tokens, in eager mode and compiled. A static cache keeps all
shapes equal from token to token, so one graph serves every step of the decoding. Prints whether
both wrote the same tokens, and tokens per second. Needs `pip install "ipex-inductor[demo]"`.
"""

import argparse
import time

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(quick: bool) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    hidden, layers = (64, 2) if quick else (512, 8)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.1,
        eos_token_id=None,  # always write as many tokens as were requested
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(model: LlamaForCausalLM, prompt: Tensor, tokens: int) -> Tensor:
    """Write `tokens` tokens after the prompt, the most likely one each time."""
    mask = torch.ones_like(prompt)
    static = {"cache_implementation": "static", "do_sample": False}
    return model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, **static)


def main() -> None:
    """Generate in eager mode, compile the model, and generate again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two thin layers, few tokens")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    model = make_model(quick)
    prompt, tokens = torch.randint(1, 1000, (1, 8)), 12 if quick else 64
    texts, rates = [], []
    for compiled in (False, True):
        if compiled:
            model.compile(backend="ipex", dynamic=False)  # in place: `generate` calls the module
        generate(model, prompt, tokens)  # compiles the prompt's graph and the decoding's
        start = time.perf_counter()
        texts.append(generate(model, prompt, tokens))
        rates.append(tokens / (time.perf_counter() - start))
    print("same tokens:", torch.equal(*texts))
    print("last tokens:", texts[1][0, -8:].tolist())
    print(f"eager {rates[0]:.0f} tokens/s, compiled {rates[1]:.0f} tokens/s")


if __name__ == "__main__":
    main()
