"""Results of a variant: what is wrong with it, or how fast it is."""

import statistics
from typing import Any

from ipex_inductor.cli.llm.jobs import Child, Job

CHECKS = ("logits", "beam")


def describe_error(facts: dict[str, Any]) -> str:
    """Return why results are wrong, "" if they are not."""
    for kind in CHECKS:
        error, limit = facts.get(f"{kind}_error", 0), facts.get(f"{kind}_limit", 0)
        if not error <= limit:  # also for NaN
            return f"wrong: {kind} off by {error:.3g}, {limit:.3g} allowed"
    return ""


def summarize(child: Child, job: Job, bandwidth: float) -> dict[str, Any]:
    """Return times in milliseconds, and the share of the bandwidth that the fastest token has.

    Args:
        child: after its turns.
        job: of the child.
        bandwidth: GB/s of the device.
    """
    steps = [step for turn in child.turns for step in turn["steps"]]
    prefill = min(turn["prefill"] for turn in child.turns)
    facts: dict[str, Any] = {
        "prefill_ms": round(prefill * 1e3, 2),
        "prefill_tokens_s": round(job.batch * job.prompt / prefill, 1),
        "least_ms": round(min(steps) * 1e3, 3),
        "median_ms": round(statistics.median(steps) * 1e3, 3),
        "tokens_s": round(job.batch / statistics.median(steps), 1),
        "gb_s": round(bandwidth, 1),
    }
    if child.facts.get("bytes_read"):
        rate = (child.facts["bytes_read"] + child.facts["bytes_keys"]) / min(steps) / 1e9
        facts |= {"read_gb_s": round(rate, 1), "of_bandwidth": round(rate / bandwidth, 3)}
    return facts
