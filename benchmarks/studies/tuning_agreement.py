"""Summarize repeated tunings: agreement of the winners, and regret.

    python -m benchmarks repeated_tuning cuda 10
    python -m benchmarks tuning_agreement CASE COMMAND GPUS build/repeated_tuning/{1..10}

Prints the rows of `results/repeated_tuning.jsonl`: one of all problems, then one for each problem
on which the databases disagree. `identical` is the share of problems with a single winner, in a
problem's row the share of databases with the most frequent winner. `two_agree` is the share of
problems on which two databases agree, the mean over all pairs, and `least_agree` the least.
`regret` is the loss of a winner against the choice of all databases together, and `mean_loss` its
loss against the fastest by all of them, which is the cost of preferring ties.
"""

import json
import statistics
import sys
from collections import Counter
from pathlib import Path

from ipex_inductor.autotune.comparison import words
from ipex_inductor.autotune.comparison.regret import regret
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import encode


def main() -> None:
    """Judge and print."""
    case, command, gpus, *folders = sys.argv[1:]
    databases = [[*Records(Path(folder))] for folder in folders]
    found = regret(databases)
    together = pool(record for database in databases for record in database)
    by = max((r.provenance for database in databases for r in database), key=lambda by: by.date)
    common = {
        "date": by.date[:10],
        "command": command,
        "device": f"{gpus} x {by.device} (driver {by.driver})",
        "torch": by.torch,
        "triton": by.triton,
    }
    figures = {
        "identical": round(found.identical(), 4),
        "two_agree": round(statistics.fmean(found.agreements()), 4),
        "least_agree": round(min(found.agreements()), 4),
        "worst_regret": round(found.worst(), 4),
        "mean_regret": round(found.mean(), 6),
        "mean_loss": round(statistics.fmean(losses(found, together)), 6),
    }
    print_row({"case": case, **figures, **common})
    for row in found.rows:
        if row.identical < 1:
            print_row({"case": "problem", "of": case, **describe_problem(row), **common})


def losses(found, together):
    """Yield each winner's loss against the fastest choice, by all databases together."""
    for row in found.rows:
        estimates = together[row.key].estimates()
        fastest = min(estimate.p50 for estimate in estimates.values())
        yield from (estimates[encode(w)].p50 / fastest - 1 for w in row.winners if w)


def describe_problem(row):
    """Return the problem, its winners and their regret."""
    problem = row.problem
    shapes = ("x".join(map(str, operand.shape)) for operand in problem.operands)
    return {
        "op": problem.op,
        "shapes": " ".join(shapes),
        "epilogue": problem.epilogue,
        "identical": row.identical,
        "best": words.choice(row.best.choice),
        "best_us": round(row.best.p50, 3),
        "winners": Counter(words.choice(winner) for winner in row.winners if winner),
        "worst_regret": round(row.worst, 4),
    }


def print_row(row):
    """Print a row as JSON."""
    print(json.dumps(row))


if __name__ == "__main__":
    main()
