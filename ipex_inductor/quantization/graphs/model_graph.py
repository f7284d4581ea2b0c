"""A graph module that has all parameters and buffers of a model, not only those of its graph."""

import copy
from collections.abc import Collection
from typing import Any, Self

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ipex_inductor.errors import QuantizationError

# Public names of prepared and quantized models.
PUBLIC = (
    *("layer_decisions", "tensor_scales", "tensor_observers", "set_tensor_scales"),
    *("save", "save_qconf_summary", "load_qconf_summary"),
)
RESERVED = {*PUBLIC, "meta", *dir(GraphModule)} - set(dir(nn.Module))


def refuse_names(model: nn.Module, names: Collection[str] = RESERVED) -> None:
    """Refuse a model that has a module, parameter or buffer of one of these names.

    Raises:
        QuantizationError: with the names.
    """
    taken = [*model._modules, *model._parameters, *model._buffers]
    clashes = [name for name in taken if name in names]
    if clashes:
        raise QuantizationError(
            "a model that leaves the names of quantized models free",
            f"{type(model).__name__}, which has {', '.join(map(repr, clashes))}",
            "Rename it, or wrap the model in a module that has it under another name.",
        )


class ModelGraph(GraphModule):
    """A graph whose state dict equals that of the model it was captured from.

    Parameters and buffers are shared with `root`. Private attributes begin with `_ipex_`, so that
    they are not those of the model.
    """

    _ipex_kept: tuple[str, ...] = ()  # plain attributes that copies keep

    def __init__(self, root: nn.Module, graph: Graph) -> None:
        super().__init__(root, graph)
        share_state(root, self)
        self.eval()  # graphs are of inference

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with parameters of its own."""
        result: Self = super().__deepcopy__(memo)  # type: ignore[assignment]
        share_state(copy.deepcopy(_state_tree(self), memo), result)
        for name in vars(self).keys() & self._ipex_kept:
            setattr(result, name, copy.deepcopy(getattr(self, name), memo))
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast parameters and buffers; tensors that the graph makes follow to a device."""
        before = _only_device(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = _only_device(self)
        if before is not None and after is not None and before != after:
            _move_factories(self, before, after)
        return self

    def __reduce__(self) -> Any:
        """Refuse to pickle: `torch.fx` would compute all that depends on weights once and for all.

        Raises:
            QuantizationError: always.
        """
        raise QuantizationError(
            "another way to save a captured model",
            "pickle",
            "Call its method save, trace it with torch.jit.trace, or export it with torch.export.",
        )

    def _deepcopy_init(self) -> Any:
        return GraphModule.__init__


def _only_device(module: nn.Module) -> torch.device | None:
    """Return the device of all parameters and buffers, None if there are several or none."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return devices.pop() if len(devices) == 1 else None


def _move_factories(module: GraphModule, before: torch.device, after: torch.device) -> None:
    """Have the graph make tensors on device `after` that it makes on device `before`."""
    moved = False
    for node in module.graph.nodes:
        device: Any = node.kwargs.get("device")
        if device is not None and torch.device(device).type == before.type:
            node.kwargs = {**node.kwargs, "device": after}
            moved = True
    if moved:
        module.recompile()


def share_state(source: nn.Module, target: nn.Module) -> None:
    """Give `target` all parameters and buffers of `source` under their names."""
    for path, module in source.named_modules(remove_duplicate=False):
        if not module._parameters and not module._buffers:
            continue
        place = _submodule(target, path)
        for name, parameter in module._parameters.items():
            place.register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            place.register_buffer(name, buffer, persistent=persistent)


def _submodule(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule at `path`, made of empty modules where there is none."""
    for name in path.split(".") if path else []:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module._modules[name]  # type: ignore[assignment]
    return module


def _state_tree(module: nn.Module) -> nn.Module:
    """Return plain modules with the parameters and buffers of `module`."""
    tree = nn.Module()
    share_state(module, tree)
    return tree


def copy_graph(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of a graph, and the copy of each node."""
    result, nodes = Graph(), dict[Node, Node]()
    output = result.graph_copy(graph, nodes)
    (old,) = graph.find_nodes(op="output")
    result.output(output).meta = dict(old.meta)
    result.set_codegen(copy.copy(graph._codegen))
    return result, nodes
