"""Data flow between modules of a model, read from a run or from plain sequentials.

A copy of the model runs, so that whatever `forward` stores is not stored in the user's model. It
runs on real tensors, as whatever it stores elsewhere (a cache of the process, say) stays there.
"""

import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ipex_inductor.frontend.casting import is_own_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
UNSAMPLED = "give a sample_input: without one only neighbours in plain nn.Sequentials fold"
READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
OUTSIDE = ""  # the user of a value outside watched modules: an op of forward, or the caller


@dataclass(frozen=True)
class Call:
    """One call of a module with the single argument `x`, None for other arguments.

    `y` is the result and `shape` is its shape, None without a sample.
    """

    x: Hashable
    y: Hashable
    shape: tuple[int, ...] | None = None


@dataclass
class Flow:
    """Calls of the watched modules by name, and the users of each value.

    `handled` names modules whose parameters are used outside their call. `unseen` says why some
    calls are not known, `reason` why none is. `result` is the model's output for the sample.
    """

    reason: str = ""
    unseen: str = ""
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    users: dict[Hashable, set[str]] = field(default_factory=lambda: defaultdict(set))
    makers: dict[Hashable, str] = field(default_factory=dict)
    handled: set[str] = field(default_factory=set)
    result: Any = None

    def call(self, name: str) -> Call | str:
        """Return the one call of a module, or the reason why there is not exactly one."""
        calls = self.calls.get(name, [])
        if not calls and self.unseen:
            return self.reason or self.unseen
        if self.reason or len(calls) != 1:
            return self.reason or f"{name} is called {len(calls)} times"
        return calls[0]

    def note(self, name: str, call: Call) -> None:
        """Record that module `name` was called."""
        self.calls[name].append(call)
        self.makers[call.y] = name


Watch = Callable[[nn.Module], bool]


def flow_of(model: nn.Module, sample_input: Any, watch: Watch) -> Flow:
    """Return the flow of `model` in calls like that on `sample_input`, or in any call without one.

    `watch` picks the modules to look at. A sample is a tensor, a tuple of arguments, or a dict of
    keyword arguments.
    """
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return Flow("hooks on all modules of the process see what would be folded away")
    if sample_input is None:
        return _trace_sequentials(model)
    try:
        twin = copy.deepcopy(model)
        args, kwargs = _copy_sample(sample_input)
    except Exception as error:
        return Flow(f"the model or its sample_input cannot be copied: {_first_line(error)}")
    return _run(twin, args, kwargs, watch)


def differs(
    model: nn.Module, sample_input: Any, flow: Flow, change: Callable[[nn.Module], None]
) -> str | None:
    """Return why a copy of `model` after `change` is not as good on the sample; None if it is.

    A change by `flow` is right if `forward` depends on nothing else. The flow does not show
    attributes of modules that are read, nor tensors that are read as Python numbers.
    """
    twin = copy.deepcopy(model)
    change(twin)
    for module in twin.modules():
        _remove_hooks(module)
    args, kwargs = _copy_sample(sample_input)
    try:
        with torch.no_grad(), _random_state_kept(model):
            result = twin(*args, **kwargs)
    except Exception as error:
        return f"folded, forward does not run on the sample_input: {_first_line(error)}"
    olds, news = tree_leaves(flow.result), tree_leaves(result)
    if len(olds) == len(news) and all(map(_is_close, olds, news)):
        return None
    return "folded, the sample_input gives another result: forward depends on more than its calls"


def _copy_sample(sample_input: Any) -> Any:
    return copy.deepcopy(tree_map_only(torch.Tensor, _detach_clone, arguments(sample_input)))


def _is_close(old: Any, new: Any) -> bool:
    """Return whether two tensors agree to half of the dtype's digits, as after rounding."""
    if not isinstance(old, torch.Tensor) or not old.is_floating_point() or not old.numel():
        return True
    if not isinstance(new, torch.Tensor) or old.shape != new.shape:
        return False
    digits = torch.finfo(old.dtype).eps ** 0.5
    largest = old.nan_to_num(posinf=0, neginf=0).abs().max().item()
    return torch.allclose(new, old, rtol=0, atol=digits * largest, equal_nan=True)


def arguments(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a sample input as positional and keyword arguments."""
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    if isinstance(sample_input, (tuple, list)):
        return tuple(sample_input), {}
    return (sample_input,), {}


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook or a patched `forward` sees or changes what passes through `module`."""
    attributes = vars(module)
    return "forward" in attributes or not all(
        is_own_hook(h) for kind in HOOKS for h in attributes[kind].values()
    )


def _trace_sequentials(model: nn.Module) -> Flow:
    """Return the flow of `nn.Sequential`s alone: torch's forward, which calls each child once.

    A trace of other forwards would hold for no call: `is None`, `isinstance`, and flags are not
    seen.
    """
    flow = Flow(unseen=UNSAMPLED)
    names = {module: name for name, module in model.named_modules()}

    def follow(module: nn.Module, x: Hashable) -> Hashable:
        if type(module) is nn.Sequential and not has_hooks(module):
            return reduce(lambda value, child: follow(child, value), module, x)
        y = object()
        flow.users[x].add(names[module])
        flow.note(names[module], Call(x, y))
        flow.handled |= {names[inner] for inner in module.modules() if inner is not module}
        return y

    flow.users[follow(model, object())].add(OUTSIDE)
    return flow


def _run(model: nn.Module, args: Any, kwargs: Any, watch: Watch) -> Flow:
    """Return the flow of one call without the user's hooks.

    It holds for calls that take an equal path through the code.
    """
    recorder = _Recorder(model, watch)
    try:
        with torch.no_grad(), _random_state_kept(model), recorder:
            result = model(*args, **kwargs)
    except Exception as error:
        return Flow(f"forward did not run on the sample_input: {_first_line(error)}")
    recorder.finish()  # while `result` holds what the caller gets
    recorder.flow.result = result
    return recorder.flow


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the calls of the watched modules, and all ops on their results.

    A value is its storage, which views and `.data` share. Weak references to a storage keep its
    address from being used again.
    """

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = Flow()
        self._inside: list[str] = []
        self._given: set[StorageWeakRef] = set()
        self._owners: dict[StorageWeakRef, set[str]] = defaultdict(set)
        for name, module in model.named_modules():
            if has_hooks(module):
                _remove_hooks(module)
                self._see(module)
            if watch(module):
                tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                for value in _storages(tensors):
                    self._owners[value].add(name)
                self._hook(name, module)

    def _hook(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(name)

        def leave(module: nn.Module, args: Any, kwargs: Any, y: Any) -> None:
            self._inside.pop()
            if isinstance(y, torch.Tensor):
                alone = len(args) == 1 and not kwargs
                call = Call(_storage(args[0]) if alone else None, _storage(y), tuple(y.shape))
                self._given.add(_storage(y))
                self.flow.note(name, call)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def _see(self, module: nn.Module) -> None:
        """Mark the module's inputs and outputs as used, as its removed hooks would see them."""

        def mark_used(module: nn.Module, *values: Any) -> None:
            for value in _storages(values):
                self.flow.users[value].add(OUTSIDE)

        module.register_forward_pre_hook(mark_used, with_kwargs=True)
        module.register_forward_hook(mark_used, with_kwargs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not READS_VALUES.isdisjoint(func.tags):
            raise RuntimeError(f"its way may depend on the values of tensors ({func})")
        inside = self._inside[-1] if self._inside else OUTSIDE
        for value in _storages((args, kwargs)):
            if value in self._given:
                self.flow.users[value].add(inside)
            self.flow.handled |= self._owners.get(value, set()) - {inside}
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        """Mark values alive after the call as used: its result or a stored object holds them."""
        if not all(map(_is_dead, self._given)):
            gc.collect()
        for value in self._given:
            if not _is_dead(value):
                self.flow.users[value].add(OUTSIDE)


def _storages(values: Any) -> list[StorageWeakRef]:
    tensors = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))
    return [_storage(t) for t in tensors if t.layout is torch.strided]  # others have none


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_dead(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _detach_clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()  # inference tensors and those with a history cannot be copied


def _remove_hooks(module: nn.Module) -> None:
    for kind in HOOKS:
        hooks = vars(module)[kind]
        for key in [key for key, hook in hooks.items() if not is_own_hook(hook)]:
            del hooks[key]


def _random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    return torch.random.fork_rng(devices, device_type=kind)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
