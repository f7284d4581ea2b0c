"""Graphs for `torch.compile`, compiled for a GPU that is not here.

They become entries of the kernel cache under the keys that they are looked for by where that GPU
is, if torch is the same build there.
"""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ipex_inductor import compat, graph_files
from ipex_inductor.aot_cache import opened
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.backend import compile_graph, copied
from ipex_inductor.prebuild import described
from ipex_inductor.target import Target

Tensor = torch.Tensor
GPU = torch.device("cuda", described.INDEX)


@dataclass(frozen=True)
class Prebuilt:
    """What was compiled for one target; `entries` are empty where torch has no code for GPUs."""

    target: Target
    entries: Mapping[Key, Entry]
    graphs: int
    made: described.Made
    seconds: float


def prebuild(
    model: nn.Module,
    example_inputs: Sequence[Any],
    target: Target,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Prebuilt:
    """Compile `model`, in inference, as `torch.compile(model, backend="ipex")` does on `target`.

    For the shapes, dtypes and strides of `example_inputs` and `kwargs`. Nothing is timed: records,
    tables and models choose. Raises what `described.device` raises, and what does not compile.
    """
    began = time.perf_counter()
    with (
        described.device(target) as made,
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        compat.dynamo_unchanged(),
        graph_files.looked_for() as found,
    ):
        twin, args, named = _described((model, tuple(example_inputs), dict(kwargs or {})))

        def compile_and_go_on(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            eager = copied(gm)
            compile_graph(gm, inputs, mode=mode, options={**(options or {}), "strict": True})
            return eager.forward

        torch.compile(twin, backend=compile_and_go_on)(*args, **named)
    store = opened.store()
    keys = (files.key for files in found if files.key)
    entries = {key: entry for key in keys if store and (entry := store.get(key))}
    return Prebuilt(target, entries, len(found), made, time.perf_counter() - began)


def _described(value: Any) -> Any:
    """A copy whose tensors are fake ones on the GPU, each once, with the same strides."""
    parts = [part for part in pytree.tree_leaves(value) if isinstance(part, nn.Module)]
    fakes = {id(tensor): _fake(tensor) for part in parts for tensor in _tensors(part)}
    placed = pytree.tree_map_only(Tensor, _fake, value)
    return pytree.tree_map_only(nn.Module, lambda part: copy.deepcopy(part, dict(fakes)), placed)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _fake(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
