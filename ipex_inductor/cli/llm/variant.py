"""Process of one variant of `ipex-inductor llm bench`: prepare it, check it, time generations.

    python -m ipex_inductor.cli.llm.variant '<JSON of jobs.Job>'

It writes a JSON object with its facts to stdout, then one for each line of stdin. All other output
goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.cli.demo.models import DTYPES
from ipex_inductor.cli.llm import checking, memory
from ipex_inductor.cli.llm.jobs import BANDWIDTH, WARM_UP, Job
from ipex_inductor.cli.llm.models import build_without_memory, load_model, read_config
from ipex_inductor.errors import IpexError

Say = Callable[[dict[str, Any]], None]
OURS = "ours"


@dataclass
class Clock:
    """A stopping criterion that never stops, and notes the time of each new token."""

    stamps: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note the time, and return False for each text."""
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Variant:
    """A model that one variant runs, and its generations.

    Args:
        job: of the process.
        model: loaded, quantized if the job says so.
    """

    def __init__(self, job: Job, model: Any) -> None:
        import transformers

        configs: Any = transformers
        # Greedy, without end and without other processors of logits that a folder may ask for.
        model.generation_config = configs.GenerationConfig(do_sample=False, pad_token_id=0)
        self.job, self.extra = job, dict[str, Any]()
        self.model = self._prepare(model)

    def _prepare(self, model: Any) -> Any:
        if self.job.variant == OURS:
            return optimize(self.job, model)
        if self.job.variant != "eager":
            self._compile(model)
        return model

    def _compile(self, model: Any) -> None:
        """Let Inductor compile the model, with a static cache.

        On GPUs `generate` compiles the model itself; on CPUs it does not.
        """
        self.extra["cache_implementation"] = "static"
        if self.job.device == "cpu":
            model.forward = torch.compile(model.forward)
            return
        from transformers import CompileConfig

        mode = "reduce-overhead" if self.job.variant == "reduce-overhead" else "default"
        self.extra["compile_config"] = CompileConfig(mode=mode, fullgraph=False)

    def generate(self, prompt: Tensor, new: int, **extra: Any) -> Any:
        """Return what `generate` returns for exactly `new` greedy tokens."""
        mask = torch.ones_like(prompt)
        arguments = {"attention_mask": mask, "max_new_tokens": new, **self.extra, **extra}
        with torch.inference_mode():
            return self.model.generate(prompt, **arguments)

    def take_turn(self, prompt: Tensor) -> dict[str, Any]:
        """Return seconds of the prompt, and of each token after it or of all in the mean."""
        beams = {"num_beams": self.job.beams} if self.job.beams > 1 else {}
        if self.job.device != "cpu":
            return self._time_whole(prompt, **beams)
        clock = Clock()
        begin = time.perf_counter()
        self.generate(prompt, self.job.new, stopping_criteria=[clock], **beams)
        stamps = clock.stamps
        steps = [after - before for before, after in pairwise(stamps)]
        return {"prefill": stamps[0] - begin, "steps": steps}

    def _time_whole(self, prompt: Tensor, **beams: Any) -> dict[str, Any]:
        """Return seconds of the prompt with one token, and of each further token in the mean.

        The host runs ahead of a GPU, so single tokens have no times of their own.
        """
        seconds = []
        for new in (1, self.job.new):
            getattr(torch, self.job.device).synchronize()
            begin = time.perf_counter()
            self.generate(prompt, new, **beams)
            getattr(torch, self.job.device).synchronize()
            seconds.append(time.perf_counter() - begin)
        first, whole = seconds
        return {"prefill": first, "steps": [(whole - first) / max(1, self.job.new - 1)]}

    def check(self, reference: checking.Reference) -> dict[str, Any]:
        """Return the errors of logits, and of beams if there are some, beside their limits."""
        device = self.job.device
        error = checking.measure_error(self.generate, reference, device, self.job.new)
        facts: dict[str, Any] = {"logits_error": error, "logits_limit": reference.limit}
        if self.job.beams > 1:
            prompt = reference.tokens[:, : -checking.CHECKED].to(device)
            kept = {"return_dict_in_generate": True, "output_scores": True}
            output = self.generate(prompt, checking.CHECKED, num_beams=self.job.beams, **kept)
            facts["beam_error"] = checking.measure_beam_error(self.model, output, prompt.shape[1])
            facts["beam_limit"] = checking.beam_limit(reference)
        return facts


def load(job: Job) -> Any:
    """Return the model of a job, on quantized weights if the job says so."""
    model = load_model(job.model, getattr(torch, DTYPES[job.dtype]), job.device)
    if job.weights:
        from ipex_inductor.quantization import quantize_weights

        model = quantize_weights(model, job.qconfig(), inplace=True)
    return model


def optimize(job: Job, model: Any) -> Any:
    """Return the model with the package's own forward and generate."""
    from ipex_inductor import llm

    dtype = getattr(torch, DTYPES[job.dtype])
    return llm.optimize(model, dtype=dtype, inplace=True, device=job.device)


def write_reference(job: Job) -> dict[str, Any]:
    """Write the exact logits of the job's tokens; return their limit."""
    config = read_config(job.model)
    tokens = checking.draw_tokens(
        config.get_text_config(decoder=True).vocab_size, job.batch, job.prompt
    )
    dtype = getattr(torch, DTYPES[job.dtype])
    reference = checking.make_reference(load(job), tokens, dtype)
    reference.save(job.reference)
    return {"logits_limit": reference.limit}


def prepare(job: Job) -> tuple[Variant, Tensor, dict[str, Any]]:
    """Return the variant after its first generations, its prompt, and its facts."""
    build_without_memory(read_config(job.model), torch.float32)  # imports the model's code
    empty = memory.read_resident() if job.device == "cpu" else 0
    model = load(job)
    facts = describe_bytes(job, model)
    loaded = memory.read_peak(job.device)
    reference = checking.Reference.load(job.reference)
    prompt = reference.tokens[:, : -checking.CHECKED].to(job.device)
    variant = Variant(job, model)
    begin = time.perf_counter()
    variant.take_turn(prompt)
    first = time.perf_counter() - begin
    for _ in range(WARM_UP - 1):
        variant.take_turn(prompt)
    facts |= {"first_s": round(first, 2), "bytes_empty": empty, "bytes_loaded": loaded}
    facts["bytes_peak"] = memory.read_peak(job.device)
    return variant, prompt, facts | variant.check(reference)


def describe_bytes(job: Job, model: Any) -> dict[str, Any]:
    """Return bytes of weights, of those that a token reads, and of its keys and values."""
    config = model.config.get_text_config(decoder=True)
    texts, item = job.batch * job.beams, getattr(torch, DTYPES[job.dtype]).itemsize
    middle = job.prompt + job.new // 2
    return {
        "bytes_weights": memory.count_bytes(model),
        "bytes_read": memory.count_read_bytes(model),
        "bytes_keys": memory.count_cache_bytes(config, texts, middle, item),
        "bytes_cache": memory.count_cache_bytes(config, texts, job.prompt + job.new, item),
    }


def serve(job: Job, say: Say) -> None:
    """Do the job: facts first, then an answer for each line of stdin."""
    if job.variant == "reference":
        say(write_reference(job))
        return
    if job.variant == "bandwidth":
        say({})
        for _ in sys.stdin:
            say({"gb_s": memory.measure_bandwidth(job.device)})
        return
    variant, prompt, facts = prepare(job)
    say(facts)
    for line in sys.stdin:
        if line.strip() == BANDWIDTH:
            say({"gb_s": memory.measure_bandwidth(job.device)})
        else:
            say(variant.take_turn(prompt))


def main() -> None:
    """Run the job of the command line; errors are answers too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with answers

    def say(facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    try:
        serve(Job.from_json(sys.argv[1]), say)
    except IpexError as error:
        say({"error": str(error)})
    except torch.OutOfMemoryError as error:
        say({"error": f"out of memory: {error}"})


if __name__ == "__main__":
    main()
