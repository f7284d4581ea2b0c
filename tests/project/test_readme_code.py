"""The Python code of README.md runs as it is printed."""

import re
from pathlib import Path

import torch

README = (Path(__file__).parents[2] / "README.md").read_text()
QUICKSTART, MIGRATION = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_quickstart_runs(capsys):
    assert len([line for line in QUICKSTART.splitlines() if line]) <= 20
    names = {}
    exec(QUICKSTART, names)
    printed = capsys.readouterr().out
    assert "torch.Size([8, 10])" in printed
    assert "linear+gelu" in printed
    assert names["model"][0].weight.grad is not None
    assert names["model"][0].weight.dtype == torch.bfloat16
    assert names["adamw"].state


def test_the_migrated_import_runs():
    names = {"torch": torch, "model": torch.nn.Linear(4, 4)}
    exec(MIGRATION, names)
    assert names["model"].weight.dtype == torch.bfloat16
