"""Process of llama.cpp for the study `llm`, in its own environment with llama-cpp-python and gguf.

    FOLDER/bin/python benchmarks/common/llm_llamacpp.py '<JSON of a job>' CHECKPOINT

The checkpoint of transformers is written as a GGUF file beside it, once for each type of weights:
bf16, q8_0 or q4_0 in all linear layers and the embedding. It answers as
`ipex_inductor.cli.llm.variant` does.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CHECKED = 8  # tokens after the prompt in a reference
WARM_UP = 2  # generations
# Errors of logits that llama.cpp may have. It rounds weights by itself, to 8 and to 4 bits in
# groups of 32, and activations to 8 bits; other logits than those of the model are off by 1.4.
LIMITS = {"bf16": 0.03, "q8_0": 0.06, "q4_0": 0.5}
BITS = {"bf16": 16, "q8_0": 8.5, "q4_0": 4.5}  # of a weight, with its scales
FILE_TYPES = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def read_peak() -> int:
    """Return the largest memory of this process, in bytes."""
    with open("/proc/self/status") as rows:
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM"))


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and bf16 tensors of a checkpoint, as arrays of their bits."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, dtype=np.uint8, mode="r")
        length = int(data[:8].view(np.uint64)[0])
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        for name, row in header.items():
            assert row["dtype"] == "BF16", f"{name} in {row['dtype']}"
            first, last = row["data_offsets"]
            yield (
                name,
                data[8 + length + first : 8 + length + last].view(np.uint16).reshape(row["shape"]),
            )


def interleave_halves(bits: Any, heads: int) -> Any:
    """Return rows of queries or keys in the order in which llama.cpp rotates those of Llama."""
    shape = bits.shape
    split = bits.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(shape))


def write_gguf(folder: Path, file: Path) -> None:
    """Write the checkpoint of a folder as a GGUF file in bf16, norms and biases in fp32."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    kind, layers = config["model_type"], config["num_hidden_layers"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), layers)
    for name, bits in read_tensors(folder):
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            bits = interleave_halves(bits, heads if "q_proj" in name else groups)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if bits.ndim == 1:
            writer.add_tensor(target, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            octets = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(target, octets, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def count_read_bytes(folder: Path, file: Path, kind: str) -> int:
    """Return the bytes that a token reads: all but an embedding that is no head too."""
    config = json.loads((folder / "config.json").read_text())
    size = config["vocab_size"] * config["hidden_size"] * BITS[kind] / 8
    return file.stat().st_size - (0 if config.get("tie_word_embeddings") else int(size))


def find_file(folder: Path, kind: str, threads: int) -> Path:
    """Return the GGUF file with this type of weights; write it if it is not there."""
    import llama_cpp

    plain = folder / "bf16.gguf"
    if not plain.exists():
        write_gguf(folder, plain)
    if kind not in FILE_TYPES:
        return plain
    file = folder / f"{kind}.gguf"
    if not file.exists():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, FILE_TYPES[kind])
        settings.nthread, settings.pure = threads, True
        code = llama_cpp.llama_model_quantize(bytes(plain), bytes(file), settings)
        assert code == 0, f"llama_model_quantize returned {code}"
    return file


class Model:
    """A loaded model and its decoding, by llama.cpp's C functions."""

    def __init__(self, job: dict[str, Any], file: Path, threads: int) -> None:
        import llama_cpp

        self.job, self.api = job, llama_cpp
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.use_mmap = False  # else the pages of the file count as memory or not by chance
        self.model = llama_cpp.llama_model_load_from_file(bytes(file), settings)
        assert self.model, "llama.cpp did not load the file"
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = job["prompt"] + job["new"] + CHECKED + 8
        settings.n_batch = settings.n_ubatch = max(512, job["prompt"])
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def reset(self) -> None:
        """Forget all tokens."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def decode(self, tokens: list[int]) -> Any:
        """Compute tokens and return the logits behind the last one, a view."""
        values = (self.api.llama_token * len(tokens))(*tokens)
        batch = self.api.llama_batch_get_one(values, len(tokens))
        code = self.api.llama_decode(self.context, batch)
        assert code == 0, f"llama_decode returned {code}"
        logits = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.words,))

    def take_turn(self, prompt: list[int]) -> dict[str, Any]:
        """Return seconds of the prompt and of each token after it."""
        self.reset()
        steps, begin = [], time.perf_counter()
        token = int(self.decode(prompt).argmax())
        before = time.perf_counter()
        prefill = before - begin
        for _ in range(self.job["new"] - 1):
            token = int(self.decode([token]).argmax())
            after = time.perf_counter()
            steps.append(after - before)
            before = after
        return {"prefill": prefill, "steps": steps}

    def check(self, tokens: list[int], exact: Any) -> float:
        """Return the error of the logits, relative to the exact ones [CHECKED + 1, words]."""
        self.reset()
        rows = [self.decode(tokens[:-CHECKED]).copy()]
        rows += [self.decode([token]).copy() for token in tokens[-CHECKED:]]
        return float(np.linalg.norm(np.stack(rows) - exact) / np.linalg.norm(exact))


def main() -> None:
    """Prepare, print facts, answer lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    assert job["batch"] == job["beams"] == 1, "llama.cpp is measured with one text"
    threads = int(os.environ["OMP_NUM_THREADS"])
    kind = job["variant"]
    arrays = np.load(job["reference"])
    tokens = arrays["tokens"][0].tolist()
    file = find_file(Path(sys.argv[2]), kind, threads)
    begin = time.perf_counter()
    model = Model(job, file, threads)
    loaded = read_peak()
    for _ in range(WARM_UP):
        model.take_turn(tokens[:-CHECKED])
    facts = {
        "first_s": round(time.perf_counter() - begin, 2),
        "bytes_read": count_read_bytes(Path(sys.argv[2]), file, kind),
        "bytes_keys": 0,
        "bytes_loaded": loaded,
        "bytes_peak": read_peak(),
        "logits_error": model.check(tokens, arrays["logits"][0]),
        "logits_limit": LIMITS[kind],
    }
    print(json.dumps(facts), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(model.take_turn(tokens[:-CHECKED])), file=answers, flush=True)


if __name__ == "__main__":
    main()
