"""Whole models that are small: 43 of seven families, defined here or by `transformers`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # support/tiny_models.py

from zoo_models import control, generation, graphs, recommendation, speech, text, vision
from zoo_models.entry import Entry

FAMILIES: dict[str, dict[str, Entry]] = {
    "vision": vision.MODELS,
    "text": text.MODELS,
    "speech": speech.MODELS,
    "recommendation": recommendation.MODELS,
    "generation": generation.MODELS,
    "graph": graphs.MODELS,
    "rl": control.MODELS,
}
MODELS = {name: entry for family in FAMILIES.values() for name, entry in family.items()}
