"""Compare inference of language models on one GPU: eager, Inductor and backend `ipex`.

    python -m benchmarks nlp [--batch 1 64] [--tokens 384] [--models bert roberta gpt2 t5 t5-whole
        llama llama-decode] [--peers NAME ...] [--tune SECONDS] [--database FOLDER] [--json FILE]

Models of transformers with random weights: the last hidden states of encoders, the logits of all
tokens of decoders (prefill without a KV cache). `llama-decode` computes the logits of the last
token beside a static KV cache of the others. `t5` is the encoder alone, `t5-whole` has a decoder
with as many tokens. `common/gpu_peers.py` describes the peers, the checks and the clock.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from common.gpu_peers import Case, describe_run, make_parser, run_cases

FEW = 1  # rows that are computed in fp64
# Of a Llama with 1.2e9 parameters.
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", {}),
    "roberta": ("RobertaConfig", "RobertaModel", {"vocab_size": 50265}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"use_cache": False}),
    "t5": ("T5Config", "T5EncoderModel", {}),  # the small one
    "t5-whole": ("T5Config", "T5ForConditionalGeneration", {"use_cache": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"use_cache": False, **LLAMA}),
    "llama-decode": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
}


class First(nn.Module):
    """Of a model's results the first, which is the states or the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.has_both = model, hasattr(model, "decoder")

    def forward(self, words: Tensor) -> Tensor:
        """Numbers of words, a row each; an encoder's are its decoder's too."""
        both = {"decoder_input_ids": words} if self.has_both else {}
        result: Tensor = self.model(words, **both, return_dict=False)[0]
        return result


class LastPlace(transformers.cache_utils.StaticLayer):  # type: ignore[misc]
    """Keys and values of one layer: the new token's are written to the last place, each call."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All of them, with the new ones."""
        place = torch.full((1,), self.max_cache_len - 1, device=keys.device)
        self.keys.index_copy_(2, place, keys)
        self.values.index_copy_(2, place, values)
        return self.keys, self.values


class Decode(nn.Module):
    """A decoder's last token, which sees `tokens`: a call writes what the one before wrote."""

    def __init__(self, model: nn.Module, batch: int, tokens: int) -> None:
        super().__init__()
        self.model, config = model, model.config
        heads = batch, config.num_key_value_heads, tokens, config.head_dim
        weight = model.lm_head.weight
        for layer, name in itertools.product(range(config.num_hidden_layers), ("keys", "values")):
            made = torch.randn(heads, device=weight.device, dtype=weight.dtype)
            self.register_buffer(f"{name}{layer}", made)
        place = torch.full((1, 1), tokens - 1, device=weight.device)
        self.register_buffer("place", place)
        self.register_buffer("seen", torch.ones(1, 1, 1, tokens, dtype=bool, device=weight.device))

    def forward(self, words: Tensor) -> Tensor:
        """A number of a word a row; of the rows that there are keys for, so many."""
        few = len(words)
        layers = [
            LastPlace(self.get_buffer(f"keys{n}")[:few], self.get_buffer(f"values{n}")[:few])
            for n in range(self.model.config.num_hidden_layers)
        ]
        result: Tensor = self.model(
            words,
            attention_mask=self.seen.expand(few, -1, -1, -1),
            position_ids=self.place.expand(few, -1),
            past_key_values=transformers.cache_utils.Cache(layers=layers),
            return_dict=False,
        )[0]
        return result


def model_of(name: str) -> tuple[nn.Module, int]:
    """Return the model in fp32 on the GPU, and the size of its vocabulary."""
    torch.manual_seed(0)
    config, kind, values = MODELS[name]
    configuration = getattr(transformers, config)(**values)
    model = getattr(transformers, kind)(configuration)
    return model.cuda().eval(), configuration.vocab_size


def cases(models: list[str], batches: list[int], tokens: int) -> Iterator[Case]:
    """Yield each model at each size."""
    for name in models:
        model, words = model_of(name)
        for batch in batches:
            decodes = name.endswith("-decode")
            whole = Decode(model, batch, tokens) if decodes else First(model)
            x = torch.randint(words, (batch, 1 if decodes else tokens), device="cuda")
            yield Case(name, whole.eval(), x, FEW, {"tokens": tokens})


def main() -> None:
    """See the top of the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    options = parser.parse_args()
    about = describe_run("transformers")
    run_cases(parser, options, cases(options.models, options.batch, options.tokens), about)


if __name__ == "__main__":
    main()
