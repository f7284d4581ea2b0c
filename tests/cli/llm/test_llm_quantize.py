"""`ipex-inductor llm quantize`: checkpoints that load, and nothing half-written after an error."""

import json
import signal

import pytest
import torch
from typer.testing import CliRunner

from ipex_inductor import llm
from ipex_inductor.cli import app
from ipex_inductor.cli.llm import quantize
from ipex_inductor.cli.llm.models import build_without_memory, load_model, read_config
from ipex_inductor.errors import CheckpointError
from ipex_inductor.llm import load_quantized
from ipex_inductor.quantization import quantize_weights
from ipex_inductor.quantization.weight_only import (
    QConfigWoq,
    WeightOnlyLinear,
    WoqWeightDtype,
    WoqWeightQScheme,
)

pytest.importorskip("transformers")
BF16 = torch.bfloat16
SYMMETRIC = WoqWeightQScheme.SYMMETRIC
LAYERS = 15  # 7 in each of two blocks, and the head


def run(*args):
    return CliRunner().invoke(app, ["llm", "quantize", *map(str, args)])


def buffers(model):
    return {
        f"{name}.{key}": value
        for name, layer in model.named_modules()
        if isinstance(layer, WeightOnlyLinear)
        for key, value in layer.named_buffers()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of transformers: the tiny shape, with a tokenizer of 256 words."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    load_model("tiny", BF16, "cpu").save_pretrained(place)
    words = {f"w{number}": number for number in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(place)
    (place / "text.txt").write_text(" ".join(f"w{n * n % 251}" for n in range(200)))
    return place


@pytest.mark.parametrize(
    ("kind", "size", "method"),
    [("int4", 32, "gptq"), ("int8", -1, "gptq"), ("nf4", 16, "ipex"), ("fp8", 32, "ipex")],
)
def test_a_checkpoint_loads_to_what_rounding_gives(tmp_path, kind, size, method):
    out = tmp_path / "out"
    done = run("tiny", out, "--weights", kind, "--group-size", size, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["layers"] == LAYERS
    assert facts["bytes_after"] < facts["bytes_before"]
    assert json.loads((out / "quantize_config.json").read_text())["quant_method"] == method
    scheme = WoqWeightQScheme.UNDEFINED if kind == "int4" else SYMMETRIC
    qconfig = QConfigWoq(WoqWeightDtype[kind.upper()], group_size=size, weight_qscheme=scheme)
    rounded = quantize_weights(load_model("tiny", BF16, "cpu"), qconfig)
    loaded = load_quantized(build_without_memory(read_config(str(out)), BF16), out)
    expected, actual = buffers(rounded), buffers(loaded)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        same = actual[name]
        assert same.dtype == tensor.dtype or method == "gptq", name
        bits = (tensor, same) if kind != "fp8" else (tensor.float(), same.float())
        assert torch.equal(*bits), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_optimize_takes_the_checkpoint(tmp_path, traced_only):
    out = tmp_path / "out"
    assert run("tiny", out, "--weights", "nf4", "--group-size", 16).exit_code == 0
    model = load_model("tiny", torch.float32, "cpu")
    model = llm.optimize(model, low_precision_checkpoint=str(out), inplace=True)
    tokens = torch.arange(5)[None]
    result = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    expected = load_model(str(out), torch.float32, "cpu")
    assert torch.equal(
        result, expected.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    )


def test_progress_names_each_layer(tmp_path):
    done = run("tiny:1", tmp_path / "out")
    lines = [line for line in done.stderr.splitlines() if "/" in line]
    assert lines[0] == "1/8 model.layers.0.self_attn.q_proj"
    assert lines[-1] == "8/8 lm_head"
    assert "written to" in done.stdout


def test_gptq_calibrates_block_by_block(folder, tmp_path):
    out = tmp_path / "out"
    text = ("--gptq", folder / "text.txt", "--length", 20, "--samples", 4)
    done = run(folder, out, "--group-size", 32, *text, "--act-order", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["layers"] == LAYERS - 1
    assert [*facts["floating"]] == ["lm_head"]
    assert "1/2 model.layers.0" in done.stderr
    assert json.loads((out / "quantize_config.json").read_text())["desc_act"]
    assert (out / "tokenizer.json").is_file()
    model = load_model(str(out), BF16, "cpu")
    logits = model(torch.arange(9)[None]).logits
    exact = load_model("tiny", BF16, "cpu")(torch.arange(9)[None]).logits
    assert 0 < (logits - exact).norm() / exact.norm() < 0.3  # 4 bits round a weight by 5 %


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_nothing_stays_after_an_error(tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(quantize.shutil, "copy2", fail)
    monkeypatch.setattr(quantize, "find_shape", lambda name: None)
    monkeypatch.setattr(quantize, "is_quantized", lambda name: False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").touch()
    with quantize.whole_folder(tmp_path / "kept") as place:
        (place / "file").touch()

    def write():
        model = quantize_weights(load_model("tiny", BF16, "cpu"), QConfigWoq())
        with quantize.whole_folder(tmp_path / "out") as place:
            quantize._write(model, place, str(tmp_path / "model"))

    with pytest.raises(type(error)):
        write()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["kept", "model"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_to_end_removes_the_folder_too(tmp_path):
    def write():
        with quantize.whole_folder(tmp_path / "out") as place:
            (place / "file").touch()
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        write()
    assert [*tmp_path.iterdir()] == []


def test_arguments_that_cannot_work(folder, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    text = folder / "text.txt"
    for args, words in (
        (("tiny", full), "OUT: a folder that is new or empty"),
        (("tiny", tmp_path / "no" / "out"), "OUT in a folder that exists"),
        (("tiny", tmp_path / "out", "--gptq", text), "a model with a tokenizer"),
        (("tiny", tmp_path / "out", "--gptq", tmp_path / "none"), "a text file"),
        (("tiny", tmp_path / "out", "--act-order"), "--gptq beside --act-order"),
        (("nothing", tmp_path / "out"), "MODEL: a folder"),
        (("tiny", tmp_path / "out", "--weights", "fp8", "--asymmetric"), "FP8 has no zero points"),
        ((folder, tmp_path / "out", "--gptq", text, "--length", 1000), "a text of 1000 tokens"),
    ):
        done = run(*args)
        assert done.exit_code == 2, (args, done.output)
        assert words in done.output.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_quantized_folder_is_refused(tmp_path):
    assert run("tiny:1", tmp_path / "one").exit_code == 0
    done = run(tmp_path / "one", tmp_path / "two")
    assert done.exit_code == 2
    assert "MODEL with floating point weights" in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("quantize_config.json", {"weight_dtype": "int3"}, "weight_dtype out of"),
        ("quantize_config.json", {"group_size": 32}, "scales"),
    ],
)
def test_changed_checkpoints_of_our_own_are_refused(tmp_path, name, change, words):
    out = tmp_path / "out"
    assert run("tiny:1", out, "--weights", "nf4", "--group-size", 16).exit_code == 0
    file = out / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    model = build_without_memory(read_config(str(out)), BF16)
    with pytest.raises(CheckpointError, match=words):
        load_quantized(model, out)
