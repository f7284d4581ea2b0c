"""The template that transposes matrices of bytes, by Triton's interpreter."""

import json
import os
import subprocess
import sys

import pytest

from support.cases import transpose_cases

pytestmark = pytest.mark.unit


def test_values_by_the_interpreter(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, transpose_cases.__file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True] * 2 * len(transpose_cases.SIZES)
