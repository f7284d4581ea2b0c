"""Measuring on the GPUs of a Ray cluster, one a worker."""

import subprocess

import pytest
import torch

from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.fleet import measure_problems
from ipex_inductor.autotune.record import encode
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.select.selection import COMMAND, store_results
from ipex_inductor.target import device

ray = pytest.importorskip(
    "ray", reason="Ray is not installed, and nothing but --engine ray needs it"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LINES = [
    f"aten.mm.default bfloat16 {rows}x512 512x256:T -> aten.relu.default(y)"
    for rows in (256, 512, 1024, 2048)
]


def test_problems_are_spread_over_both_gpus_and_resumed(tmp_path):
    problems = [*shapes.problems(LINES, str(device.current("cuda")), settings_of("cuda"))]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        assert ray.cluster_resources()["GPU"] >= 2
        told, free = {}, []
        run = measure_problems(problems, 500, COMMAND, gpus=1, cpus=0)
        for problem, answer in store_results(run, tmp_path / "db"):
            told[encode(problem)] = encode(answer)
            free.append(ray.available_resources().get("GPU", 0))
        assert free[0] == ray.cluster_resources()["GPU"] - 2, "two workers, a GPU each"
    finally:
        ray.shutdown()
    assert told.keys() == {encode(p) for p in problems}
    assert {encode(record) for record in Records(tmp_path / "db")} == {*told.values()}

    (tmp_path / "problems.txt").write_text("\n".join(LINES))
    shown = f"--shapes {tmp_path}/problems.txt --device cuda --into {tmp_path}/db --engine ray"
    done = subprocess.run(
        ["ipex-inductor", "autotune", "run", *shown.split()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "4 problems, 4 known before" in done.stdout
