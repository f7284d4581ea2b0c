"""Compare token-by-token decoding on one GPU: a Llama of 8 billion parameters in bf16.

    python -m benchmarks decode_gpu [--peers NAME ...] [--layers N] [--json FILE]

Random weights, a batch of one after a prompt of 64 tokens, and the static cache of transformers,
which the graph updates in place. Tokens a second of wall time, after those in which graphs are
compiled and captured. Peers: eager; inductor and reduce-overhead (Inductor's modes); ours (default
mode) and ours-reduce-overhead. Logits of the first tokens, and of tokens after the capture, are
checked against the same weights in fp32: a peer that is farther off than one and a half times eager
is printed as wrong, without a speed.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.capture.policy import NAME
from ipex_inductor.reporting import decisions

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.gpu_peers import append_row, describe_run

PEERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "ours": {"backend": "ipex", "options": {"strict": True}},
    "ours-reduce-overhead": {
        "backend": "ipex",
        "mode": "reduce-overhead",
        "options": {"strict": True},
    },
}
PROMPT, WARM_UP, TIMED, ROOM = 64, 28, 128, 512  # words
FARTHER = 1.5  # than eager's logits from those in fp32


def make_model(layers: int) -> tuple[Any, Any]:
    """Return the model and its configuration, with the sizes of Llama 3 8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    words = {"vocab_size": 128256, "max_position_embeddings": 8192}
    config = LlamaConfig(**sizes, **words, num_hidden_layers=layers, num_key_value_heads=8)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval(), config
    finally:
        torch.set_default_dtype(before)


def decode(
    run: Callable[..., Any], model: Any, config: Any, prompt: Tensor, words: Tensor
) -> tuple[Tensor, float, float]:
    """Decode by one peer, as the module's docstring describes."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=ROOM)
    model(prompt, past_key_values=cache, use_cache=True)
    logits = []
    begin = time.perf_counter()
    first = 0.0
    for number in range(words.shape[1]):
        if number == words.shape[1] - TIMED:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        word = words[:, number : number + 1]
        result = run(word, past_key_values=cache, use_cache=True).logits[:, -1].clone()
        if not number:
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
        if number < WARM_UP + 4:
            logits.append(result.float())
        result.argmax(-1)  # as a program would, for its next word
    torch.cuda.synchronize()
    return torch.cat(logits), first, TIMED / (time.perf_counter() - begin)


@torch.no_grad()
def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usual = ("eager", "inductor", "reduce-overhead", "ours", "ours-reduce-overhead")
    parser.add_argument("--peers", nargs="+", default=usual, choices=PEERS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    about, right = describe_run("transformers"), True
    model, config = make_model(options.layers)
    prompt, words = (
        torch.randint(5, 30000, (1, count), device="cuda") for count in (PROMPT, WARM_UP + TIMED)
    )
    few = prompt, words[:, : WARM_UP + 4]
    single = copy.deepcopy(model).float()
    exact = decode(single, single, config, *few)[0]
    del single

    def off(logits: Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    allowed = FARTHER * off(decode(model, model, config, *few)[0])
    for peer in options.peers:
        torch.compiler.reset()
        decisions.clear()
        how = PEERS[peer]
        run = model if how is None else torch.compile(model, **how)
        logits, first, speed = decode(run, model, config, prompt, words)
        row: dict[str, Any] = {"model": f"llama-{options.layers}", "peer": peer}
        row |= {"off": off(logits), "allowed": allowed}
        row["first word, s"] = round(first, 1)
        if row["off"] <= allowed:
            row["words a second"] = round(speed, 1)
        else:
            row["failed"], right = "wrong", False
        events = (event for report in decisions.reports() for event in report.events)
        row["capture"] = [event.reason for event in events if event.subject == NAME]
        append_row(options, about, row)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
