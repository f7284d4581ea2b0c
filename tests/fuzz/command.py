"""`python -m fuzz`: many programs on all cores; exit code 1 if one is wrong."""

import argparse
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from fuzz import campaign, quantized
from fuzz.campaign import Tally
from ipex_inductor.passes import joint

CHUNK = 50  # programs a task: seconds, so that progress shows


def main() -> int:
    """Parse the command line, run, print what was found."""
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000, help="fp64 twins")
    parser.add_argument("--compiled", type=int, default=120, help="programs compiled for real")
    parser.add_argument("--quantized", type=int, default=500, help="quantized programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.programs)
    sample = range(options.first, options.first + options.compiled)
    twins = _spread("fp64 twins", options.jobs, campaign.judge_seeds, seeds, CHUNK)
    compiled = _spread("compiled", options.jobs, campaign.compile_seeds, sample, 5)
    some = range(options.first, options.first + options.quantized)
    few = range(options.first, options.first + options.quantized // 20)
    rounded = _spread("quantized", options.jobs, quantized.judge_seeds, some, CHUNK // 2)
    in_code = _spread("quantized, compiled", options.jobs, quantized.judge_seeds_in_code, few, 5)
    _print_rules(twins)
    failures = [*twins.failures, *compiled.failures, *rounded.failures, *in_code.failures]
    for failure in failures:
        print(failure.text())
    print(
        f"{twins.programs} programs forward, {twins.trained} of them backward, {twins.dynamic} at"
        f" two sizes, {compiled.programs} compiled; {twins.pairs():.1%} of pairs;"
        f" {rounded.programs} quantized, {in_code.programs} of them compiled;"
        f" {len(failures)} mismatches"
    )
    return bool(failures)


def _spread(what: str, jobs: int, judge: Callable, seeds: range, size: int) -> Tally:
    """`judge` over `seeds` on `jobs` processes, with a line of progress now and then."""
    total, began = Tally(), time.monotonic()
    said = began
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _one_thread) as pool:
        for done in as_completed([pool.submit(judge, part) for part in _parts(seeds, size)]):
            total.add(done.result())
            now = time.monotonic()
            if now - said > 20 or total.programs >= len(seeds):
                said = now
                _say(what, total, len(seeds), now - began)
    return total


def _parts(seeds: range, size: int) -> Iterator[range]:
    return (seeds[i : i + size] for i in range(0, len(seeds), size))


def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # torch reports each shape that a rule tries and refuses.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def _say(what: str, total: Tally, of: int, seconds: float) -> None:
    print(
        f"{what}: {total.programs} of {of} in {seconds:.0f} s, {total.programs / seconds:.1f} a"
        f" second, {1000 * total.cpu / max(1, total.programs):.0f} ms of one core each,"
        f" {len(total.failures)} mismatches",
        flush=True,
    )


def _print_rules(total: Tally) -> None:
    names = sorted(set(total.fired) | set(total.missed) | set(total.silent()))
    width = max(map(len, names))
    print(f"\n{'rule':{width}}    fired in   missed in  training")
    for name in names:
        row = (total.fired[name], total.missed[name], total.in_training[name])
        print("  ".join((f"{name:{width}}", *map("{:>10}".format, row))))
    counts = sorted((total.fired[name], name) for name in joint.RULE_NAMES)
    print(f"never fired: {', '.join(total.silent()) or 'none'}")
    (least, name), (median, _) = counts[0], counts[len(counts) // 2]
    print(f"each rule fired in {least} programs ({name}) or more, the median in {median}\n")
