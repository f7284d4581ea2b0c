"""Which modules of a model take what others give: read from a run without data, or from a trace.

Both look at a copy of the model on fake tensors, which takes no memory, so that whatever `forward`
stores is not stored in the user's. The model itself is never replaced by what was traced.
"""

import copy
import gc
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

OUTSIDE = ""  # names whatever is no call of a watched module: an op of forward's, the caller


@dataclass(frozen=True)
class Call:
    """One call of a module with the single argument `x`, None if there were others.

    `shape` is that of the result y, None in a trace.
    """

    x: Hashable
    y: Hashable
    shape: tuple[int, ...] | None = None


@dataclass
class Flow:
    """The calls of the watched modules by name, and who uses each value.

    `handled` names those whose parameters are used outside their call. Without `calls`, `reason`
    says why nothing is known.
    """

    reason: str = ""
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    users: dict[Hashable, set[str]] = field(default_factory=lambda: defaultdict(set))
    makers: dict[Hashable, str] = field(default_factory=dict)
    handled: set[str] = field(default_factory=set)

    def call(self, name: str) -> Call | str:
        """The one call of a module, or the reason why there is none to speak of."""
        calls = self.calls.get(name, [])
        if self.reason or len(calls) != 1:
            return self.reason or f"{name} is called {len(calls)} times"
        return calls[0]

    def note(self, name: str, call: Call) -> None:
        """Module `name` was called."""
        self.calls[name].append(call)
        self.makers[call.y] = name


Watch = Callable[[nn.Module], bool]


def flow_of(model: nn.Module, sample_input: Any, watch: Watch) -> Flow:
    """The flow of `model` when called on `sample_input`, or on anything where that is None.

    `watch` picks the modules to look at. A sample is a tensor, a tuple of arguments, or a dict of
    keyword arguments.
    """
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(mode):
            twin = copy.deepcopy(model)
    except Exception as error:
        return Flow(f"the model cannot be copied: {_first_line(error)}")
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return Flow("hooks on all modules of the process see what would be folded away")
    if sample_input is None:
        return _traced(twin)
    return _run(twin, mode, *arguments(sample_input), watch)


def arguments(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample input as positional and keyword arguments."""
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    if isinstance(sample_input, (tuple, list)):
        return tuple(sample_input), {}
    return (sample_input,), {}


def _traced(model: nn.Module) -> Flow:
    """From a symbolic trace: it holds for every call, as control flow on inputs cannot be traced.

    But for `is None`, which nobody sees: hence no optional inputs.
    """
    if any(p.default is not p.empty for p in inspect.signature(model.forward).parameters.values()):
        return Flow("forward has optional arguments: a sample_input would say how it is called")
    try:
        graph = torch.fx.Tracer().trace(model)
    except Exception as error:
        return Flow(f"without a sample_input, forward cannot be traced: {_first_line(error)}")
    flow = Flow()
    for node in graph.nodes:
        name = str(node.target) if node.op == "call_module" else OUTSIDE
        for value in node.all_input_nodes:
            flow.users[value].add(name)
        if name:
            alone = len(node.args) == 1 and not node.kwargs
            flow.note(name, Call(node.args[0] if alone else None, node))
        if node.op == "get_attr":
            flow.handled.add(node.target.rpartition(".")[0])
    for value in tree_leaves([vars(module) for module in model.modules()]):
        if isinstance(value, torch.fx.Proxy):  # stored for somebody to read
            flow.users[value.node].add(OUTSIDE)
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
