"""Parameters held in low precision, and the full precision that `state_dict` shows and loads.

A module that owns such parameters carries a table of them, and two of torch's own hooks read it.
All of it is ordinary data and named functions, so modules copy and pickle as before.
"""

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import shards
from ipex_inductor.optim.bf16_split import halves, join, split, write
from ipex_inductor.optim.shards import cut_part, is_sharded, local, wrap_part

TABLE = "_ipex_weights"  # of a module: name -> Place; of an optimizer: Parameter -> Trained
MARK = "_ipex_master"  # attribute of a parameter that only a wrapped optimizer may step: its dtype
SHARDED = "_ipex_sharded"  # attribute of a parameter that `fully_shard` has replaced: its shards


class Place:
    """A parameter as its module holds it, so that its shards of `fully_shard` can be found."""

    sharded: ClassVar[bool] = False  # whether any parameter was sharded, in this process

    def __init__(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        self.param = param
        self.dtype = dtype

    def shard(self, param: nn.Parameter) -> None:
        """Refer to `param` from now on, which holds the shards of the former parameter."""
        vars(self.param)[SHARDED] = param
        Place.sharded = True
        self.param = param


class Weight(Place, ABC):
    """A parameter held in low precision, `dtype`."""

    def live(self) -> bool:
        """Return whether the parameter still has its low precision; `model.float()` ends that."""
        return self.param.dtype == self.dtype

    @abstractmethod
    def full(self) -> Tensor:
        """Return the public value."""

    @abstractmethod
    def store(self, full: Tensor) -> None:
        """Store a public value; called without gradients."""


class Rounded(Weight):
    """A parameter cast for inference; state dicts show it in `public`, its former dtype."""

    def __init__(self, param: nn.Parameter, dtype: torch.dtype, public: torch.dtype) -> None:
        super().__init__(param, dtype)
        self.public = public

    def full(self) -> Tensor:
        """Return the parameter in its public dtype."""
        return self.param.detach().to(self.public)

    def store(self, full: Tensor) -> None:
        """Store `full`, rounded to nearest."""
        self.param.copy_(full)


class Trained(Weight):
    """A parameter in training; `rest` holds what the low-precision parameter cannot."""

    def __init__(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(param, dtype)
        low, self._rest = self.split_value(param.detach())
        _become(param, low)
        self.mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.mark()

    def mark(self) -> None:
        """Mark the parameter: copies lose attributes, as do DTensors in `model.to`."""
        if MARK not in vars(self.param):
            vars(self.param)[MARK] = self.dtype
            _set_grad_dtype(self.param)

    @torch.no_grad()
    def shard(self, param: nn.Parameter) -> None:
        """Keep this process's part of the rest, and refer to `param`."""
        self._rest = cut_part(self.rest, param)
        super().shard(param)
        self.mark()

    @abstractmethod
    def split_value(self, full: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parameter and the rest for an fp32 value."""

    @property
    def rest(self) -> Tensor:
        """The rest, on the device of the parameter, which `model.to` may have moved."""
        if self._rest.device != self.param.device:
            self._rest = self._rest.to(self.param.device)
        return self._rest

    def stands(self) -> bool:
        """Return whether the parameter has the shape of its rest; FSDP1 replaces it by a shard."""
        return local(self.param).shape == self._rest.shape

    def is_a(self, kind: type["Trained"], dtype: torch.dtype) -> bool:
        """Return whether the parameter is held as `kind` in `dtype` already."""
        return self.live() and type(self) is kind and self.dtype == dtype

    @torch.no_grad()
    def restore(self) -> None:
        """Make the parameter fp32 again."""
        _become(self.param, self.full().clone())


class Split(Trained):
    """bf16 training: upper halves in the parameter, lower halves in `rest`, 4 bytes together.

    Code that writes the parameter sets the upper halves; the lower ones stay, which are less than
    one bf16 step.
    """

    def split_value(self, full: Tensor) -> tuple[Tensor, Tensor]:
        """Return the upper and the lower halves."""
        return split(full)

    def full(self) -> Tensor:
        """Return the joined halves, in new memory."""
        return wrap_part(join(local(self.param), self.rest), self.param)

    def store(self, full: Tensor) -> None:
        """Split `full` into the halves."""
        write(*halves(local(full)), self.rest, local(self.param))


class Master(Trained):
    """bf16 or fp16 training: fp32 in `rest`, rounded to nearest in the parameter."""

    def split_value(self, full: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rounded value, and fp32 in new memory."""
        return full.to(self.dtype), full.clone()

    def full(self) -> Tensor:
        """Return `rest`, updated where the parameter has been written since."""
        low = local(self.param)
        self.rest.copy_(torch.where(low == self.rest.to(self.dtype), self.rest, low))
        return wrap_part(self.rest, self.param)

    def store(self, full: Tensor) -> None:
        """Store `full`, and its rounded value in the parameter."""
        self.rest.copy_(local(full))  # nothing to do if it is `rest`
        local(self.param).copy_(local(full))


def _become(param: nn.Parameter, value: Tensor) -> None:
    """Give `param` the values and the dtype of `value`, and its gradient that dtype."""
    grad, param.grad = param.grad, None
    param.data = value
    _set_grad_dtype(param)
    if grad is not None:
        param.grad = grad.to(param.grad_dtype)


def _set_grad_dtype(param: nn.Parameter) -> None:
    """Have fp16 parameters get fp32 gradients, or GradScaler refuses to unscale them.

    Gradients of other dtypes follow the parameter.
    """
    if param.dtype != torch.float16:
        return
    if not is_sharded(param):
        param.grad_dtype = torch.float32
        return
    if param.requires_grad:  # FSDP delivers fp16 gradients, and then runs these hooks
        param.register_post_accumulate_grad_hook(_widen_grad)  # type: ignore[no-untyped-call]
        _widen_grad(param)


def _widen_grad(param: Tensor) -> None:
    """Allow gradients of any dtype, and upcast the present one to fp32."""
    param.grad_dtype = None  # gradients of any dtype
    if param.grad is not None:
        param.grad = param.grad.float()


def table(module: nn.Module) -> dict[str, Weight]:
    """Return the weights that `module` itself owns, by name; only `place` changes them."""
    return {n: w for n, w in _places(module).items() if isinstance(w, Weight) and w.live()}


def _places(module: nn.Module) -> dict[str, Place]:
    """Return the table of `module` without parameters that have been replaced."""
    entries: dict[str, Place] = vars(module).get(TABLE, {})
    return {n: entry for n, entry in entries.items() if module._parameters.get(n) is entry.param}


def weights_of(model: nn.Module) -> dict[nn.Parameter, Weight]:
    """Return the weights of `model` and of its submodules, by parameter."""
    return {w.param: w for module in model.modules() for w in table(module).values()}


def find_unplaced(model: nn.Module) -> dict[nn.Parameter, Place]:
    """Return places for the parameters of `model` that are in no table yet."""
    placed = {entry.param for module in model.modules() for entry in _places(module).values()}
    return {p: Place(p, p.dtype) for p in model.parameters() if p not in placed}


def place(model: nn.Module, weights: dict[nn.Parameter, Any]) -> None:
    """Have modules of `model` show and load these weights in their state dicts.

    `weights`: weights or places by parameter; each module gets the ones of its own parameters.
    """
    for module in model.modules():
        module_weights = {n: weights[p] for n, p in module._parameters.items() if p in weights}
        if module_weights and TABLE not in vars(module):
            module.register_state_dict_post_hook(_show)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]
        if module_weights:
            vars(module)[TABLE] = _Table(module, vars(module).get(TABLE, {}) | module_weights)


class _Table(dict[str, Place]):
    """Table of the parameters of `module` by name; copies refer to the copy of the module."""

    def __init__(self, module: nn.Module, entries: dict[str, Place]) -> None:
        super().__init__(entries)
        self.__setstate__(module)

    def __getstate__(self) -> nn.Module | None:
        return self.module()

    def __setstate__(self, module: nn.Module) -> None:
        from ipex_inductor.optim.step import check_steps  # it imports this module

        check_steps()
        self.module = weakref.ref(module)
        _tables[id(self)] = self


_tables: "weakref.WeakValueDictionary[int, _Table]" = weakref.WeakValueDictionary()


def find_shards() -> None:
    """Update all tables to the shards by which `fully_shard` has replaced parameters."""
    for module_table in list(_tables.values()):
        for entry in module_table.values():
            if isinstance(entry, Trained) and is_sharded(entry.param):
                entry.mark()
        module = module_table.module()
        if module is None or _places(module) == module_table or not shards.is_managed(module):
            continue
        if any(not is_sharded(entry.param) for entry in module_table.values()):
            shards.put_back(module)
        for name, entry in module_table.items():
            value = module._parameters.get(name)
            if value is not None and shards.replaces(value, entry.param):
                entry.shard(value)


def refuse_strangers(optimizer: Optimizer) -> None:
    """Raise `ArgumentError` if `optimizer` does not know master weights of its parameters.

    A plain step would change the low precision alone.
    """
    stepped_weights = vars(optimizer).get(TABLE, {})
    params = [p for group in optimizer.param_groups for p in group["params"]]
    marked = [
        p for p, attributes in zip(params, map(vars, params), strict=True) if MARK in attributes
    ]
    if any(vars(p)[MARK] == p.dtype and p not in stepped_weights for p in marked):
        raise ArgumentError(
            "an optimizer that was given to `optimize` with its model",
            f"a {type(optimizer).__name__} on parameters with master weights",
            "Pass it: `model, optimizer = optimize(model, optimizer=optimizer, dtype=...)`. After "
            "fully_shard keep the one that came back: it steps the shards.",
        )


def has_tables() -> bool:
    """Return whether any module has a table of weights."""
    return bool(_tables)


def find_displaced(params: Collection[Tensor]) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and names where a low-precision value has replaced one with a master weight.

    Only if `params` train that value. FSDP1, which flattens parameters, and parametrizations do
    so. An ordinary parameter in its place is the choice of the user, and one that only moved
    (pruning) is still stepped.
    """
    flat = {info.module for p in params for info in getattr(p, "_param_infos", ())}  # FSDP1
    for module_table in list(_tables.values()):
        module = module_table.module()
        if module is None:
            continue
        for name, weight in module_table.items():
            if isinstance(weight, Trained) and _is_displaced(module, name, weight):
                owned_params = set(module.parameters()) | {weight.param}
                if module in flat or not owned_params.isdisjoint(params):
                    yield module, name


def _is_displaced(module: nn.Module, name: str, weight: Trained) -> bool:
    """Return whether a low-precision value stands in for the parameter of `weight`."""
    if module._parameters.get(name) is weight.param:
        return weight.live() and not weight.stands()
    if not weight.live() or any(p is weight.param for p in module.parameters()):
        return False
    value = getattr(module, name, None)
    if not isinstance(value, Tensor) or value.dtype != weight.dtype:
        return False
    if not is_sharded(weight.param):
        return type(value) is not nn.Parameter
    if not is_sharded(value):  # gathered, or tied to a parameter that was sharded
        return vars(value).get(SHARDED) is weight.param
    return shards.same_mesh(value, weight.param)  # FSDP may use another mesh between two passes


# Where a weight was last shown: tied modules show one tensor under two names, as torch does.
_shown: "weakref.WeakKeyDictionary[Weight, tuple[Any, str]]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def _show(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
    """Write copies in full precision to a state dict, which later steps do not change."""
    _look_for_shards(module)
    for name, weight in table(module).items():
        key = prefix + name
        if key not in state_dict:
            continue
        shown_in, shown_key = _shown.get(weight, (lambda: None, key))
        if shown_in() is state_dict and shown_key != key:
            state_dict[key] = state_dict[shown_key]
            continue
        needs_grad = state_dict[key].requires_grad  # with keep_vars
        state_dict[key] = weight.full().clone().requires_grad_(needs_grad)
        if isinstance(state_dict, OrderedDict):  # a plain dict has no weak references
            _shown[weight] = weakref.ref(state_dict), key


@torch.no_grad()
def _load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Take full precision out of a state dict, and leave the low precision for torch to check.

    `assign=True` makes the caller's tensor the parameter, which is an ordinary one from then on.

    Raises `ArgumentError` if the state dict holds the sharded parameter itself.
    """
    if metadata.get("assign_to_params_buffers", False):
        return
    shards.put_back(module)  # FSDP does so after this hook
    _look_for_shards(module)
    for name, weight in table(module).items():
        value = state_dict.get(prefix + name)
        if value is weight.param and is_sharded(value):
            raise ArgumentError(
                "a state dict of full precision",
                f"one of the parameters themselves, for {prefix + name!r}",
                "broadcast_from_rank0 writes into them: give each process the whole state dict.",
            )
        if isinstance(weight, Trained) and isinstance(value, Tensor) and _fits(value, weight.param):
            if _is_memory_of(value, weight.param):
                continue  # torch copies it onto itself; what the parameter cannot hold stays
            weight.store(_shape_like(weight.param, value.to(weight.param.device, torch.float32)))
            state_dict[prefix + name] = weight.param.detach()


def _is_memory_of(value: Tensor, param: Tensor) -> bool:
    """Return whether `value` is the memory of `param`."""
    same_kind = value.dtype == param.dtype and value.device == param.device
    return same_kind and not is_sharded(value) and value.data_ptr() == param.data_ptr()


def _look_for_shards(module: nn.Module) -> None:
    """Find shards if a parameter of `module` has been replaced."""
    if _places(module) != vars(module).get(TABLE, {}):
        find_shards()


def _fits(value: Tensor, param: Tensor) -> bool:
    """Return whether torch would load `value`: an equal shape, or one element for a scalar."""
    if is_sharded(value) != is_sharded(param):
        return False  # torch reports it
    return value.shape == param.shape or (param.dim() == 0 and value.shape == (1,))


def _shape_like(param: Any, value: Any) -> Tensor:
    """Return `value` in the shape of `param`, or sharded as `param` is."""
    if is_sharded(param):
        return value.redistribute(param.device_mesh, param.placements)  # type: ignore[no-any-return]
    return value.view(param.shape)  # type: ignore[no-any-return]
