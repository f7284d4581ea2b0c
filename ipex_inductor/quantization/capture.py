"""Capture of a model as a graph of torch-level operators, whose parameters are the model's."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.graphs.in_place import replace_in_place_ops
from ipex_inductor.quantization.graphs.model_graph import refuse_names, share_state
from ipex_inductor.quantization.scheme import Layer, paths_around

aten = torch.ops.aten
DROPOUTS = {
    *(aten.dropout.default, aten.dropout_.default),
    *(aten.feature_dropout.default, aten.feature_dropout_.default),
    *(aten.alpha_dropout.default, aten.alpha_dropout_.default),
}
GUARDS = "_guards_fn"  # node and module by which torch.export checks sizes of inputs
EXPORT_LOCK = threading.RLock()  # torch.export changes state of the process
LAYER = "layer"  # key of a node's meta: its `Layer`


def capture_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> GraphModule:
    """Return `model` in eval mode as a graph that shares its parameters and buffers.

    Each operator's node has a `Layer` in `meta["layer"]`. All sizes of inputs may differ later.

    Raises:
        QuantizationError: if `torch.export` cannot capture the model, or it has a reserved name.
    """
    refuse_names(model)
    if not isinstance(args, tuple):
        args = (args,)
    module = _export(model, args, kwargs or {})
    _erase_guards(module)
    _register_constants(module)
    share_state(model, module)  # tied parameters have one name in an exported program
    _erase_identities(module.graph)
    replace_in_place_ops(module.graph)
    _name_layers(module.graph, model)
    module.recompile()
    return module


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphModule:
    """Return the graph of `torch.export`, of any sizes.

    A dimension of size 1 may be a batch or broadcast. The first is for a batch, others broadcast;
    if that fails all of them broadcast. One thread at a time captures.
    """
    with EXPORT_LOCK, ExitStack() as stack:
        stack.enter_context(_in_eval_mode(model))
        stack.enter_context(torch.no_grad())
        for device in {"cpu", *(p.device.type for p in model.parameters())}:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            with compat.one_as_any_size():
                return _export_sizes(model, args, kwargs, any_batch=True)
        except Exception:
            pass  # the second attempt's error names the cause
        try:
            return _export_sizes(model, args, kwargs, any_batch=False)
        except Exception as error:
            raise QuantizationError(
                "a model that torch.export captures",
                f"{type(error).__name__} from {type(model).__name__}: {_first_line(error)}",
                "Control flow that depends on values cannot be captured. Use dynamic quantization, "
                "which needs no capture, or quantize the part of the model that can be.",
            ) from error


def _export_sizes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], any_batch: bool
) -> GraphModule:
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    dim = torch.export.Dim
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            fixed = [size == 1 and (i > 0 or not any_batch) for i, size in enumerate(value.shape)]
            shapes[value] = {i: dim.STATIC if f else dim.AUTO for i, f in enumerate(fixed)}
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False).module()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _erase_guards(module: GraphModule) -> None:
    for node in module.graph.find_nodes(op="call_module", target=GUARDS):
        module.graph.erase_node(node)
    if hasattr(module, GUARDS):
        delattr(module, GUARDS)


def _register_constants(module: GraphModule) -> None:
    """Make constants, which are plain attributes, buffers outside of the state dict."""
    for node in module.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        owner = module.get_submodule(path)
        value = getattr(owner, name)
        if isinstance(value, torch.Tensor) and name not in owner._parameters | owner._buffers:
            delattr(owner, name)
            owner.register_buffer(name, value, persistent=False)


def _erase_identities(graph: torch.fx.Graph) -> None:
    """Erase dropout of inference, slices of everything, and checks of dtypes.

    The checks would fail under autocast.
    """
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    for node in graph.nodes:
        arguments = node.args[1:]
        is_dropout = node.target in DROPOUTS and not arguments[-1]
        is_slice = node.target is aten.slice.Tensor and tuple(arguments[1:]) == (0, sys.maxsize)
        if is_dropout or is_slice:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _name_layers(graph: torch.fx.Graph, model: nn.Module) -> None:
    """Give each operator's node a name of module path, operator and number in that module."""
    counts: Counter[tuple[str, str]] = Counter()
    modules = dict(model.named_modules(remove_duplicate=False))
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta[LAYER] = Layer(f"input:{index}", "input", "")
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta[LAYER] = Layer(str(node.target), "parameter", "")
        if node.op == "call_function":
            path, operator = _module_path(node), operator_name(node)
            number = counts[path, operator]
            counts[path, operator] += 1
            name = f"{path}:{operator}:{number}"
            node.meta[LAYER] = Layer(name, operator, path, _class_names(modules, path))


def operator_name(node: Node) -> str:
    """Return the name of a node's operator without namespace and overload."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(packet.__name__ if packet else getattr(target, "__name__", target))


def _module_path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if "empty_nn_module_stack" not in entry[0]]
    return str(paths[-1]).split("@")[0] if paths else ""


def _class_names(modules: dict[str, nn.Module], path: str) -> tuple[str, ...]:
    """Return classes of the module at `path` with their bases, then those of modules around it."""
    around = [modules[p] for p in [*paths_around(path), ""] if p in modules]
    bases = dict.fromkeys(base for module in around for base in type(module).__mro__)
    classes = [base for base in bases if base not in (nn.Module, object)]
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in classes)


def tensor_type(node: Node) -> torch.dtype | None:
    """Return the dtype of a node's value, None if it is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
