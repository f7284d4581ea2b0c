"""Which modules of a model take what others give: read from a run without data, or from a trace.

Both look at a copy of the model on fake tensors, which takes no memory, so that whatever `forward`
stores is not stored in the user's. The model itself is never replaced by what was traced.
"""

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ipex_inductor.frontend.casting import is_own_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
UNSAMPLED = "give a sample_input: without one only neighbours in plain nn.Sequentials fold"
OUTSIDE = ""  # names whatever is no call of a watched module: an op of forward's, the caller


@dataclass(frozen=True)
class Call:
    """One call of a module with the single argument `x`, None if there were others.

    `shape` is that of the result y, None without a sample.
    """

    x: Hashable
    y: Hashable
    shape: tuple[int, ...] | None = None


@dataclass
class Flow:
    """The calls of the watched modules by name, and who uses each value.

    `handled` names those whose parameters are used outside their call. `unseen` says why some calls
    are not known, `reason` why none is.
    """

    reason: str = ""
    unseen: str = ""
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    users: dict[Hashable, set[str]] = field(default_factory=lambda: defaultdict(set))
    makers: dict[Hashable, str] = field(default_factory=dict)
    handled: set[str] = field(default_factory=set)

    def call(self, name: str) -> Call | str:
        """The one call of a module, or the reason why there is none to speak of."""
        calls = self.calls.get(name, [])
        if not calls and self.unseen:
            return self.reason or self.unseen
        if self.reason or len(calls) != 1:
            return self.reason or f"{name} is called {len(calls)} times"
        return calls[0]

    def note(self, name: str, call: Call) -> None:
        """Module `name` was called."""
        self.calls[name].append(call)
        self.makers[call.y] = name


Watch = Callable[[nn.Module], bool]


def flow_of(model: nn.Module, sample_input: Any, watch: Watch) -> Flow:
    """The flow of `model` in calls like that on `sample_input`, or in any call where that is None.

    `watch` picks the modules to look at. A sample is a tensor, a tuple of arguments, or a dict of
    keyword arguments.
    """
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return Flow("hooks on all modules of the process see what would be folded away")
    if sample_input is None:
        return _chained(model)
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(mode):
            twin = copy.deepcopy(model)
    except Exception as error:
        return Flow(f"the model cannot be copied: {_first_line(error)}")
    return _run(twin, mode, *arguments(sample_input), watch)


def arguments(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample input as positional and keyword arguments."""
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    if isinstance(sample_input, (tuple, list)):
        return tuple(sample_input), {}
    return (sample_input,), {}


def hooked(module: nn.Module) -> bool:
    """Whether somebody sees or changes what goes into `module` or out of it."""
    own = vars(module)
    return "forward" in own or not all(is_own_hook(h) for kind in HOOKS for h in own[kind].values())


def _chained(model: nn.Module) -> Flow:
    """From `nn.Sequential`s alone: their forward calls each child once, and is nobody else's code.

    A trace of other forwards would hold for no call: `is None`, `isinstance`, and flags go unseen.
    """
    flow = Flow(unseen=UNSAMPLED)
    names = {module: name for name, module in model.named_modules()}

    def follow(module: nn.Module, x: Hashable) -> Hashable:
        if type(module) is nn.Sequential and not hooked(module):
            return reduce(lambda value, child: follow(child, value), module, x)
        y = object()
        flow.users[x].add(names[module])
        flow.note(names[module], Call(x, y))
        flow.handled |= {names[inner] for inner in module.modules() if inner is not module}
        return y

    flow.users[follow(model, object())].add(OUTSIDE)
    return flow


def _run(model: nn.Module, mode: FakeTensorMode, args: Any, kwargs: Any, watch: Watch) -> Flow:
    """From one call on tensors without data: it holds for calls that take the same way."""
    recorder = _Recorder(model, watch)
    try:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        with torch.no_grad(), mode, recorder:
            result = model(*args, **kwargs)
    except Exception as error:
        return Flow(f"forward did not run on a fake sample_input: {_first_line(error)}")
    recorder.finish()
    del result  # until here it held what the caller gets
    return recorder.flow


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of the watched modules, and all ops on what they give."""

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = Flow()
        self._inside: list[str] = []
        self._tokens = 0
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}
        self._owners: dict[int, str] = {}
        for name, module in model.named_modules():
            if watch(module):
                self._owners |= {id(p): name for p in module.parameters(recurse=False)}
                self._hook(name, module)

    def _hook(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(name)

        def leave(module: nn.Module, args: Any, kwargs: Any, y: Any) -> None:
            self._inside.pop()
            if isinstance(y, torch.Tensor):
                alone = len(args) == 1 and not kwargs
                x = self._token(args[0]) if alone else None
                call = Call(x, self._token(y), tuple(y.shape))
                self._given[call.y] = weakref.ref(y)  # type: ignore[index]
                self.flow.note(name, call)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def _token(self, value: torch.Tensor) -> int:
        """A number that a tensor carries as long as it lives."""
        if not hasattr(value, "_ipex_token"):
            self._tokens += 1
            value._ipex_token = self._tokens  # type: ignore[attr-defined]
        return value._ipex_token  # type: ignore[attr-defined, no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = self._inside[-1] if self._inside else OUTSIDE
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and func.namespace != "prim":  # asks for the device
                if hasattr(value, "_ipex_token"):
                    self.flow.users[value._ipex_token].add(inside)
                if self._owners.get(id(value), inside) != inside:
                    self.flow.handled.add(self._owners[id(value)])
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        """What is alive after the call is held by its result, or was stored somewhere."""
        if any(ref() is not None for ref in self._given.values()):
            gc.collect()
        for token, ref in self._given.items():
            if ref() is not None:
                self.flow.users[token].add(OUTSIDE)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
