"""Process of IPEX 2.8 for the study `llm`: `ipex.llm.optimize` in bf16, in its own environment.

    FOLDER/bin/python benchmarks/common/llm_ipex28.py '<JSON of a job>' CHECKPOINT

It answers as `ipex_inductor.cli.llm.variant` does, whose package its torch cannot import.
"""

import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

CHECKED = 8  # tokens after the prompt in a reference
WARM_UP = 3  # generations; the first one traces


def read_peak() -> int:
    """Return the largest memory of this process, in bytes."""
    with open("/proc/self/status") as rows:
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM"))


class Clock:
    """A stopping criterion that never stops, and notes the time of each new token."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Note the time."""
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class ForcedTokens:
    """A processor of logits that keeps them and chooses the given tokens, [batch, steps]."""

    def __init__(self, tokens: Any) -> None:
        self.tokens, self.logits = tokens, list[Any]()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores that are 0 for the next token and minus infinity for all others."""
        step = min(len(self.logits), self.tokens.shape[1] - 1)
        self.logits.append(scores.float())
        chosen = self.tokens[:, step : step + 1]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class Model:
    """An optimized model and its generations."""

    def __init__(self, job: dict[str, Any], folder: str) -> None:
        import intel_extension_for_pytorch as ipex
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.job = job
        model = AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=torch.bfloat16, torchscript=True
        ).eval()
        self.loaded = read_peak()
        weights = {id(p): p.nbytes for p in model.parameters()}
        self.read = sum(weights.values())
        if model.lm_head.weight is not model.model.embed_tokens.weight:
            self.read -= model.model.embed_tokens.weight.nbytes
        model.config.text_max_length = job["prompt"] + job["new"]
        model.config.lm_head_generation = True
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self.model = ipex.llm.optimize(model, dtype=torch.bfloat16, inplace=True)

    def generate(self, prompt: Any, **extra: Any) -> None:
        """Generate tokens greedily, or by beams."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        kinds = {"stopping_criteria": StoppingCriteriaList, "logits_processor": LogitsProcessorList}
        extra = {
            name: kinds[name](value) if name in kinds else value for name, value in extra.items()
        }
        sizes = {"max_new_tokens": self.job["new"], "attention_mask": torch.ones_like(prompt)}
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            self.model.generate(prompt, **sizes, **extra)

    def take_turn(self, prompt: Any) -> dict[str, Any]:
        """Return seconds of the prompt and of each token after it."""
        clock, begin = Clock(), time.perf_counter()
        self.generate(prompt, stopping_criteria=[clock], num_beams=self.job["beams"])
        stamps = clock.stamps
        steps = [after - before for before, after in pairwise(stamps)]
        return {"prefill": stamps[0] - begin, "steps": steps}

    def check(self, tokens: Any, exact: Any) -> float:
        """Return the error of the logits, relative to the exact ones."""
        forced = ForcedTokens(tokens[:, -CHECKED:])
        self.generate(tokens[:, :-CHECKED], logits_processor=[forced])
        logits = torch.stack(forced.logits[: CHECKED + 1], 1)
        return float((logits - exact).norm() / exact.norm())


def main() -> None:
    """Prepare, print facts, answer lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    arrays = np.load(job["reference"])
    tokens, exact = (torch.from_numpy(arrays[name]) for name in ("tokens", "logits"))
    prompt = tokens[:, :-CHECKED]
    model = Model(job, sys.argv[2])
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        model.take_turn(prompt)
    facts = {
        "first_s": round(time.perf_counter() - begin, 2),
        "bytes_loaded": model.loaded,
        "bytes_read": model.read,
        "bytes_keys": 0,
        "bytes_peak": read_peak(),
        "logits_error": model.check(tokens, exact),
        "logits_limit": float(arrays["limit"]),
    }
    print(json.dumps(facts), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(model.take_turn(prompt)), file=answers, flush=True)


if __name__ == "__main__":
    main()
