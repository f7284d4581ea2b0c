"""Each example runs with `--quick` in a process of its own, and prints what it promises."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.report_page import read_page_data

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))
README = (EXAMPLES / "README.md").read_text()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NUMBER = r"([-+\d.e]+)"


@pytest.fixture
def run(instructions_known, products_known):
    """Run Python on an example with `--quick`; return what it printed."""

    def run(*arguments):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *arguments, "--quick"],
            cwd=EXAMPLES,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def numbers(pattern, text):
    """The numbers in the line that the pattern finds."""
    (found,) = re.findall(pattern.replace("#", NUMBER), text)
    return tuple(map(float, found)) if isinstance(found, tuple) else float(found)


def rules(text):
    (found,) = re.findall(r"^rules applied: (.*)$", text, re.M)
    return ast.literal_eval(found)


@pytest.mark.slow
def test_image_classification(run):
    text = run("image_classification.py")
    eager, compiled = re.findall(r"top-5, \w+: +(\[.*\])", text)
    assert eager == compiled
    assert len(ast.literal_eval(eager)) == 5
    assert numbers("largest relative difference: #", text) < 1e-4  # fp32, some twenty layers
    assert rules(text)["conv2d+batch_norm"] > 0
    assert numbers("compiled # ms: # times as fast", text) > (0, 0)


@pytest.mark.slow
def test_text_encoder(run):
    text = run("text_encoder.py")
    for name in ("eager", "compiled"):
        assert numbers(f"{name}: largest difference from float32 #", text) < 0.02  # bf16: 8 bits
    assert sum(rules(text).values()) > 0


@pytest.mark.slow
def test_text_generation(run):
    text = run("text_generation.py")
    assert "same tokens: True" in text
    assert min(numbers("eager # tokens/s, compiled # tokens/s", text)) > 0


@pytest.mark.slow
def test_train_bf16(run):
    text = run("train_bf16.py")
    assert "weights: torch.bfloat16 - state dict: torch.float32" in text
    assert "fired: fuse_update_step at AdamW" in text
    first, last = numbers("loss fell from # to #", text)
    assert last < 0.9 * first


@pytest.mark.slow
def test_diffusion_unet(run):
    text = run("diffusion_unet.py")
    assert numbers("largest relative difference: #", text) < 1e-4
    assert sum(rules(text).values()) > 0


def test_fused_optimizer(run):
    text = run("fused_optimizer.py")
    plain, fused = (
        numbers(f"{name}: loss #, gradient norm #", text) for name in ("torch", "fused")
    )
    assert fused == pytest.approx(plain, rel=1e-2)  # gradients in fp16
    # A step of AdamW is at most about the rate, 1e-3, however small the gradient.
    assert numbers("largest difference of the weights: #", text) < 1e-3


@pytest.mark.slow
def test_fused_optimizer_fsdp(run):
    text = run(*TORCHRUN, "fused_optimizer_fsdp.py")
    for rank in range(2):
        assert f"rank {rank}: (16, 16) of (32, 16), torch.bfloat16" in text
    assert numbers("gradient norm over all shards: #", text) > 0
    first, last = numbers("loss fell from # to #", text)
    assert last < first


@pytest.mark.slow
def test_compare_autotune(run, tmp_path):
    page = tmp_path / "report.html"
    text = run("compare_autotune.py", "--html", str(page))
    assert numbers("exit code #: ", text) in (0, 1)  # the same kernels, on a noisy machine
    assert page.read_text().lower().startswith("<!doctype html>")
    assert "aten.bmm" in str(read_page_data(page))


def test_old_ipex_script(run):
    text = run("-m", "ipex_inductor.as_ipex", "old_ipex_script.py")
    first, last = numbers("loss fell from # to #", text)
    assert last < 0.5 * first
    assert numbers("largest difference from float32: #", text) < 0.02


@pytest.mark.slow
def test_prebuilt_bundle(run):
    pytest.importorskip("cryptography")
    text = run("prebuilt_bundle/run_steps.py")
    assert "$ ipex-inductor prebuild model:make --package" in text
    assert "compilers: []" in text
    assert "Inductor imported: False" in text
    assert numbers("largest difference from eager mode: #", text) < 1e-5


# What can be read


@pytest.mark.unit
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_says_how_it_is_run_and_the_table_has_it(file):
    tree = ast.parse(file.read_text())
    name = file.relative_to(ROOT).as_posix()
    if file.stem not in ("model", "serve"):  # of the container
        assert f"{name} [--quick]" in ast.get_docstring(tree)
        assert f"{name}`" in README
    assert len(file.read_text().splitlines()) <= (110 if file.stem == "run_steps" else 90)


@pytest.mark.unit
def test_the_old_script_has_old_names_alone():
    tree = ast.parse((EXAMPLES / "old_ipex_script.py").read_text())
    assert "ipex_inductor" not in ast.unparse(tree.body[1:])  # but for the docstring


@pytest.mark.unit
def test_the_table_names_files_that_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (EXAMPLES / link).exists(), link
