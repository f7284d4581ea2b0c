"""Encoders beside a decoder: of an encoder-decoder, of pictures, of sound; compiled as a whole."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ipex_inductor import compat
from ipex_inductor.llm.steps import Steps

# Names of modules that encode pictures or sound, in models of transformers.
TOWERS = ("vision_tower", "vision_model", "audio_tower", "image_encoder")


class CompiledTower:
    """The `forward` of an encoder: compiled for its first shapes, then once for any.

    Copies and pickles keep the module. Their code is compiled again at first use.

    Args:
        module: the encoder, whose attribute `forward` this becomes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = vars(module).get("forward")
        self.steps = Steps(self.eager)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "own": self.own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.steps = Steps(self.eager)

    @property
    def eager(self) -> Callable[..., Any]:
        """Return the forward that the encoder had."""
        own: Callable[..., Any] = self.own or type(self.module).forward.__get__(self.module)
        return own

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the encoder's own forward: `generate` reads it."""
        return inspect.signature(self.eager)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the encoder."""
        if torch.compiler.is_compiling() or compat.is_traced_by_others() or self.module.training:
            return self.eager(*args, **kwargs)
        return self.steps.call_whole(args, kwargs)


def find_towers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of the encoders of `model`, none inside of another."""
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        yield from ((name, module) for name, module in model.named_modules() if module is encoder)
        return
    prefixes: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TOWERS and not name.startswith(prefixes or ("\0",)):
            prefixes += (f"{name}.",)
            yield name, module


def compile_towers(model: Any) -> list[str]:
    """Give each encoder of `model` a compiled forward, and return their names."""
    towers = list(find_towers(model))
    for _, module in towers:
        vars(module)["forward"] = CompiledTower(module)
    return [name for name, _ in towers]


def release_towers(model: nn.Module) -> None:
    """Give encoders of `model` their own forward back."""
    for module in model.modules():
        tower = vars(module).get("forward")
        if isinstance(tower, CompiledTower):
            del vars(module)["forward"]
            if tower.own is not None:
                vars(module)["forward"] = tower.own
