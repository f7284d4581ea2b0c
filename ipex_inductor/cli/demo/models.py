"""Subjects of `ipex-inductor demo`: the models, the contestants, and a child process's job.

The module imports no torch at the top: the parent process and `--help` read its tables without it.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ipex_inductor.errors import OptionError

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

INSTALL = 'Run: pip install "ipex-inductor[demo]"'


class Dtype(StrEnum):
    """The dtypes that weights and inputs can be cast to."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Device(StrEnum):
    """The devices that models can run on."""

    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"


@dataclass(frozen=True)
class Architecture:
    """A model of `transformers` by the names of its classes, with the published sizes."""

    title: str
    config: str
    model: str
    image: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "resnet50": Architecture(
        "ResNet-50", "ResNetConfig", "ResNetForImageClassification", True, {"num_labels": 1000}
    ),
    "bert": Architecture("BERT-base", "BertConfig", "BertModel"),
    "vit": Architecture(
        "ViT-B/16", "ViTConfig", "ViTForImageClassification", True, {"num_labels": 1000}
    ),
    "gpt2": Architecture(
        "GPT-2 small", "GPT2Config", "GPT2LMHeadModel", False, {"use_cache": False}
    ),
}
TOKENS, PIXELS = 128, 224


@dataclass(frozen=True)
class Contestant:
    """One way to run a model: eager where `backend` is None."""

    name: str
    title: str
    backend: str | None = None
    mode: str = "default"
    freezing: bool = False


CONTESTANTS = (
    Contestant("eager", "eager"),
    Contestant("inductor", "Inductor", "inductor"),
    Contestant(
        "frozen", "Inductor frozen, max-autotune", "inductor", "max-autotune", freezing=True
    ),
    Contestant("ipex", "ipex", "ipex"),
)


@dataclass(frozen=True)
class Job:
    """One child process's job: task "cold" (first call only) or "measure".

    `folder` holds the caches of this model, one folder per contestant; all children share
    `scratch`.
    """

    task: str
    model: str
    dtype: str
    batch: int
    device: str | None
    contestants: tuple[Contestant, ...]
    folder: Path
    scratch: Path
    seconds: float

    def to_json(self) -> str:
        """Return the job as one argument of a command line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the job that `to_json` wrote."""
        values = json.loads(text)
        values["contestants"] = tuple(Contestant(**c) for c in values["contestants"])
        paths = {key: Path(values[key]) for key in ("folder", "scratch")}
        return cls(**{**values, **paths})


def title(name: str) -> str:
    """Return the model's name in a table."""
    return MODELS[name].title if name in MODELS else name


def check_name(name: str) -> None:
    """Raise `OptionError` for a model that cannot be loaded, before anything is started."""
    if ":" in name:
        return
    if name not in MODELS:
        advice = "Name one of these, or a function of yours that returns (model, inputs)."
        raise OptionError(f"{', '.join(MODELS)} or MODULE:FUNCTION", f"model {name!r}", advice)
    if importlib.util.find_spec("transformers") is None:
        raise OptionError("transformers to be installed", "no such package", INSTALL)


def load(
    name: str, dtype: str | None, batch: int, device: str
) -> tuple["torch.nn.Module", tuple[Any, ...]]:
    """Return the model in eval mode and example inputs, with equal weights in every process.

    Args:
        name: a named model, or MODULE:FUNCTION, which brings its own inputs.
        dtype: the dtype of weights and floating-point inputs; None leaves MODULE:FUNCTION's as they
            are.
        batch: the batch size of the named models.
        device: the device to move both to.
    """
    import torch
    from torch.utils._pytree import tree_map

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, floating if value.is_floating_point() else None)

    floating = getattr(torch, DTYPES[dtype]) if dtype else None
    torch.manual_seed(0)
    model, inputs = _from_config(MODELS[name], batch) if name in MODELS else _from_user(name)
    return model.eval().to(device, floating), tree_map(place, inputs)


def _from_config(arch: Architecture, batch: int) -> tuple["torch.nn.Module", tuple[Any, ...]]:
    import torch

    try:
        import transformers
    except ImportError as error:
        raise OptionError("transformers to be installed", str(error), INSTALL) from error
    config = getattr(transformers, arch.config)(**arch.overrides)
    model = getattr(transformers, arch.model)(config)
    _fill_batch_norms(model)
    if not arch.image:
        return model, (torch.randint(0, config.vocab_size, (batch, TOKENS)),)
    channels_last = torch.channels_last
    image = torch.randn(batch, 3, PIXELS, PIXELS).to(memory_format=channels_last)
    return model.to(memory_format=channels_last), (image,)


def _fill_batch_norms(model: "torch.nn.Module") -> None:
    """Fill batch norms with statistics as after training: fresh ones (0 and 1) hide wrong folding.

    Gains of 0.7 keep the activations near 1; at 1 they grow to hundreds, and a mean that is lost in
    one of the last layers is too small to be seen.
    """
    import torch

    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(norm.weight, 0.35, 1.05)
            torch.nn.init.normal_(norm.bias, 0, 0.3)
            norm.running_mean = torch.randn(norm.num_features) * 0.3
            norm.running_var = torch.rand(norm.num_features) + 0.5


def _from_user(name: str) -> tuple["torch.nn.Module", tuple[Any, ...]]:
    """Return the model and inputs of a user's MODULE:FUNCTION; raise `OptionError`."""
    import torch

    result = call_user(name)
    match result:
        case (model, tuple(inputs)) if isinstance(model, torch.nn.Module):
            return model, inputs
    actual = (
        ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else result
    )
    raise OptionError(
        f"{name} to return (model, tuple of inputs), the model a torch.nn.Module",
        str(actual),
        "Return such a pair.",
    )


def find_user(name: str) -> Any:
    """Return the function MODULE:FUNCTION of a user; raise `OptionError`."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _typed_errors(f"{name} to be importable"):
        return getattr(importlib.import_module(module), function)


def call_user(name: str) -> Any:
    """Return the result of a user's MODULE:FUNCTION; raise `OptionError`."""
    function = find_user(name)
    with _typed_errors(f"{name} to run"):
        return function()


@contextmanager
def _typed_errors(expected: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        actual = f"{type(error).__name__}: {error}"
        advice = "The current directory is importable; try the call in Python."
        raise OptionError(expected, actual, advice) from error
