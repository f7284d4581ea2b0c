"""Language models by a folder of transformers, or by the name of a shape with random weights.

The module imports neither torch nor transformers at the top: `--help` reads its table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipex_inductor.errors import MissingPackageError, OptionError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

INSTALL = 'Run: pip install "ipex-inductor[demo]"'
BLOCK = 4_194_301  # random values that weights repeat; a prime, so no two rows are equal


@dataclass(frozen=True)
class Shape:
    """A published model's sizes: the class of its config, and arguments of that class."""

    config: str
    sizes: dict[str, Any] = field(default_factory=dict)


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, words: int) -> Shape:
    """Return a Llama of these sizes; `groups` are heads of keys and values."""
    return Shape(
        "LlamaConfig",
        {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "vocab_size": words,
            "max_position_embeddings": 8192,
        },
    )


_QWEN = _llama(896, 4864, 24, 14, 2, 151936).sizes
SHAPES = {
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000),
    "qwen2.5-0.5b": Shape("Qwen2Config", {**_QWEN, "tie_word_embeddings": True}),
    "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256),
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "tiny": _llama(64, 128, 2, 4, 2, 256),
}


def find_shape(name: str) -> Shape | None:
    """Return the shape of a name, `SHAPE` or `SHAPE:LAYERS`; None for other names."""
    base, _, layers = name.partition(":")
    shape = SHAPES.get(base)
    if shape is None or not layers.isdigit():
        return None if layers else shape
    return Shape(shape.config, {**shape.sizes, "num_hidden_layers": int(layers)})


def check_model(name: str) -> None:
    """Raise `OptionError` if `name` is neither a shape nor a folder of a model."""
    if find_shape(name) or (Path(name) / "config.json").is_file():
        return
    came = "a folder without config.json" if Path(name).is_dir() else "neither"
    raise OptionError(
        f"MODEL: a folder of transformers, or SHAPE or SHAPE:LAYERS out of {', '.join(SHAPES)}",
        f"{name!r}, {came}",
        "Save a model by save_pretrained, or copy its files.",
    )


def load_model(name: str, dtype: "torch.dtype", device: str) -> Any:
    """Return a model in eval mode, its weights in `dtype` on `device`.

    A folder with a quantized checkpoint gives a model on quantized weights.

    Args:
        name: a folder, or a name of `find_shape`.
        dtype: of the weights that are not quantized.
        device: "cpu", "cuda" or "xpu".
    """
    config = read_config(name)
    if find_shape(name):
        return draw_model(config, dtype, device)
    if is_quantized(name):
        from ipex_inductor.llm import load_quantized

        return load_quantized(build_without_memory(config, dtype), name).eval().to(device)
    loaded: Any = _transformers().AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return loaded.eval().to(device)


def read_config(name: str) -> Any:
    """Return the config of a folder or a shape."""
    transformers = _transformers()
    shape = find_shape(name)
    if shape is None:
        return transformers.AutoConfig.from_pretrained(name)
    return getattr(transformers, shape.config)(**shape.sizes)


def is_quantized(name: str) -> bool:
    """Return whether a folder holds a quantized checkpoint."""
    from ipex_inductor.errors import CheckpointError
    from ipex_inductor.llm.checkpoints.settings import find_settings

    try:
        find_settings(name)
    except CheckpointError:
        return False
    return True


def build_without_memory(config: Any, dtype: "torch.dtype") -> Any:
    """Return a model whose tensors are on the device meta."""
    import torch

    quantized = vars(config).pop("quantization_config", None)  # else transformers wants its package
    try:
        with torch.device("meta"):
            return _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        if quantized is not None:
            config.quantization_config = quantized


def draw_model(config: Any, dtype: "torch.dtype", device: str) -> Any:
    """Return a model with random weights, the same ones in each process.

    One block of normal values is drawn, and each weight is filled from another place in it on:
    billions of values cost a copy. A linear layer keeps the spread of its inputs, so attention has
    a share in the logits at any width, and a wrong cache shows. Weights of norms are 1.
    """
    import torch
    from torch import nn

    from ipex_inductor.llm.checkpoints.loading import compute_buffers

    model = build_without_memory(config, dtype)
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(BLOCK, generator=generator).to(device, dtype)
    compute_buffers(model)
    filled: dict[int, nn.Parameter] = {}
    for place, (module, name, old) in enumerate(_parameters(model)):
        if id(old) not in filled:
            value = torch.empty(old.shape, dtype=dtype, device=device)
            if old.dim() == 1 and name == "weight":
                value.fill_(1)
            else:
                _fill(value.view(-1), block, place * 104_729 % BLOCK)
                value *= old.shape[-1] ** -0.5
            filled[id(old)] = nn.Parameter(value, requires_grad=False)
        module.register_parameter(name, filled[id(old)])
    return model.to(device)


def _parameters(model: "nn.Module") -> "Iterator[tuple[nn.Module, str, Tensor]]":
    """Yield the owner, the name there and the value of each parameter, shared ones repeatedly."""
    for module in list(model.modules()):
        for name, value in list(module.named_parameters(recurse=False)):
            yield module, name, value


def _fill(value: "Tensor", block: "Tensor", start: int) -> None:
    """Copy the block into a flat tensor over and over, from its element `start` on."""
    first = 0
    while first < len(value):
        part = block[start : start + len(value) - first]
        value[first : first + len(part)] = part
        first, start = first + len(part), 0


def _transformers() -> Any:
    """Return the package transformers.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError("the package transformers", "no such package", INSTALL) from error
    return transformers
