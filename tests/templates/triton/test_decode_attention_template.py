"""The template of attention over a cache without a GPU: values interpreted, and binaries."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from ipex_inductor.templates.triton import decode_attention
from support.cases import decode_attention_cases
from support.cases.decode_attention_cases import CASES, Case, compile_case
from support.rendered_templates import within_limits

pytestmark = pytest.mark.unit

# Shares and the result are rounded to fp16, by at most 2^-11 each; errors of elements average.
LIMIT = 4e-4


QUICK = ("one query", "width 80")


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param((*CASES,), marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_values_by_the_interpreter(names, tmp_path):
    """Against fp64, into memory full of NaN; keys hidden at the ends are NaN too."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, decode_attention_cases.__file__, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-300:]} {done.stderr[-2000:]}"
    errors = json.loads(done.stdout)
    assert [*errors] == [*names]
    assert {name: e for name, e in errors.items() if not e < LIMIT} == {}


@pytest.mark.parametrize(
    ("width", "mask", "parts"),
    [
        (128, "padding", 16),
        pytest.param(64, "padding", 16, marks=pytest.mark.slow),
        pytest.param(80, "window", 16, marks=pytest.mark.slow),
        pytest.param(96, "alibi", 4, marks=pytest.mark.slow),
        pytest.param(128, "none", 32, marks=pytest.mark.slow),
        pytest.param(128, "padding", 1, marks=pytest.mark.slow),
        pytest.param(256, "padding", 16, marks=pytest.mark.slow),
        pytest.param(256, "alibi", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "gpu", ["h200", *(pytest.param(g, marks=pytest.mark.slow) for g in ("a100-80gb", "b200"))]
)
def test_it_compiles(width, mask, parts, gpu):
    """Without spills; keys reach shared memory by copies of 16 bytes ahead of their use."""
    case = Case(1, 8, 4, 2048, width, mask, parts)
    tile = decode_attention.choose_tile(8, 2048, width, 132)
    case = replace(case, block=tile.BLOCK_N, stages=tile.num_stages)
    made = compile_case(case, "bfloat16", gpu)
    within_limits(made, gpu)
    if mask in ("padding", "none"):  # Triton 3.9 loads none ahead where each query has a mask
        assert re.search(r"cp\.async\.\w+\.shared\.global.*0x10", made.asm["ptx"])


@pytest.mark.parametrize(
    ("groups", "keys", "width", "parts"),
    [
        (8, 512, 128, 16),
        (8, 8192, 128, 32),
        (8, 256, 64, 4),
        (128, 1024, 128, 3),
        (512, 1024, 64, 1),
    ],
)
def test_keys_are_divided_among_idle_multiprocessors(groups, keys, width, parts):
    assert decode_attention.choose_tile(groups, keys, width, 132).parts == parts
