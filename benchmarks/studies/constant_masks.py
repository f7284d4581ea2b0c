"""Measure the cost of attention masks that transformers builds when none is passed.

    python -m benchmarks constant_masks [--models bert gpt2] [--rounds 12] [--threads 1]

Backend `ipex` with and without rule `constant-mask`, in turns within one process: the least
processor time of a call, random weights, 1x384 tokens, fp32 and bf16, no gradients. Nothing is
printed if the two results differ by more than the rounding of the dtype.
"""

import argparse
import time
from typing import Any

import torch
import transformers

import ipex_inductor  # noqa: F401  the backend

TOKENS = 384
NEAR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of the largest element, after twelve layers
MODELS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig()),
    "gpt2": lambda: transformers.GPT2Model(transformers.GPT2Config(use_cache=False)),
}
RULES = {"with the mask": "-constant-mask", "without": ""}


def compile_model(model: Any, rules: str) -> Any:
    """Compile the model by backend `ipex`, without sharing graphs."""
    return torch.compile(model, backend="ipex", options={"strict": True, "rules": rules})


def least_times(calls: dict[str, Any], ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return processor seconds of a call, the calls taken in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call(ids)
            best[name] = min(best[name], time.process_time() - began)
    return best


def main() -> None:
    """One line for each model and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ids = torch.randint(0, 1000, (1, TOKENS))
    for name in args.models:
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        for dtype, near in NEAR.items():
            model.to(dtype)
            calls, results = {}, []
            with torch.no_grad():
                for label, rules in RULES.items():
                    calls[label] = compile_model(model, rules)
                    results.append(calls[label](ids).last_hidden_state.float())
                apart = (results[0] - results[1]).abs().max() / results[0].abs().max()
                assert apart <= near, f"{name} {dtype}: {apart:.1e} apart"
                seconds = least_times(calls, ids, args.rounds)
                torch.compiler.reset()
            before, after = seconds.values()
            print(
                f"{name} 1x{TOKENS} {dtype}: {before * 1e3:.0f} ms with the mask, "
                f"{after * 1e3:.0f} without ({before / after:.3f}), {apart:.1e} apart",
                flush=True,
            )


if __name__ == "__main__":
    main()
