"""Parameters held in low precision, and the full precision that `state_dict` shows and loads.

A module that owns such parameters carries a table of them, and two of torch's own hooks read it.
All of it is ordinary data and functions with a name, so modules copy and pickle as before.
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
from ipex_inductor.optim.shards import cut, is_sharded, local, whole

TABLE = "_ipex_weights"  # of a module: name -> Place; of an optimizer: Parameter -> Trained
MARK = "_ipex_master"  # of a parameter that only a wrapped optimizer may step: its dtype
SHARDED = "_ipex_sharded"  # of a parameter that `fully_shard` has replaced: by what


class Place:
    """A parameter where a module has it, by which is found what `fully_shard` makes of it."""

    sharded: ClassVar[bool] = False  # whether any was, in this process

    def __init__(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        self.param = param
        self.dtype = dtype

    def shard(self, param: nn.Parameter) -> None:
        """Go over to `param`, the shards of what there was."""
        vars(self.param)[SHARDED] = param
        Place.sharded = True
        self.param = param


class Weight(Place, ABC):
    """A parameter held in low precision, `dtype`."""

    def live(self) -> bool:
        """Not after `model.float()` or the like: then the parameter alone counts."""
        return self.param.dtype == self.dtype

    @abstractmethod
    def full(self) -> Tensor:
        """The public value."""

    @abstractmethod
    def store(self, full: Tensor) -> None:
        """Take over a public value; called without gradients."""


class Rounded(Weight):
    """Inference: the parameter is all there is; shown in `public`, the dtype it had."""

    def __init__(self, param: nn.Parameter, dtype: torch.dtype, public: torch.dtype) -> None:
        super().__init__(param, dtype)
        self.public = public

    def full(self) -> Tensor:
        """The parameter, widened."""
        return self.param.detach().to(self.public)

    def store(self, full: Tensor) -> None:
        """Round to nearest."""
        self.param.copy_(full)


class Trained(Weight):
    """Training: `rest` holds what the parameter cannot."""

    def __init__(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(param, dtype)
        low, self._rest = self.cut(param.detach())
        _become(param, low)
        self.mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.mark()

    def mark(self) -> None:
        """Mark the parameter: copies lose what they carry, as do DTensors in `model.to`."""
        if MARK not in vars(self.param):
            vars(self.param)[MARK] = self.dtype
            _set_grad_dtype(self.param)

    @torch.no_grad()
    def shard(self, param: nn.Parameter) -> None:
        """Keep of the rest what belongs to the part that this process holds."""
        self._rest = cut(self.rest, param)
        super().shard(param)
        self.mark()

    @abstractmethod
    def cut(self, full: Tensor) -> tuple[Tensor, Tensor]:
        """Parameter and rest of an fp32 value."""

    @property
    def rest(self) -> Tensor:
        """On the parameter's device, wherever `model.to` has sent that."""
        if self._rest.device != self.param.device:
            self._rest = self._rest.to(self.param.device)
        return self._rest

    def stands(self) -> bool:
        """Not after FSDP1 has put a shard in the place of the parameter's values."""
        return local(self.param).shape == self._rest.shape

    def is_a(self, kind: type["Trained"], dtype: torch.dtype) -> bool:
        """Whether nothing is to be done to hold the parameter so."""
        return self.live() and type(self) is kind and self.dtype == dtype

    @torch.no_grad()
    def restore(self) -> None:
        """Make the parameter fp32 again."""
        _become(self.param, self.full().clone())


class Split(Trained):
    """bf16 training: upper halves in the parameter, lower halves in `rest`, 4 bytes together.

    Who writes the parameter himself sets the upper halves; the lower ones stay, less than one bf16
    step.
    """

    def cut(self, full: Tensor) -> tuple[Tensor, Tensor]:
        """The two halves."""
        return split(full)

    def full(self) -> Tensor:
        """The halves put together, in new memory."""
        return whole(join(local(self.param), self.rest), self.param)

    def store(self, full: Tensor) -> None:
        """Cut `full` into the halves."""
        write(*halves(local(full)), self.rest, local(self.param))


class Master(Trained):
    """bf16 or fp16 training: fp32 in `rest`, rounded to nearest in the parameter."""

    def cut(self, full: Tensor) -> tuple[Tensor, Tensor]:
        """The rounded value, and fp32 in memory of its own."""
        return full.to(self.dtype), full.clone()

    def full(self) -> Tensor:
        """`rest`; where somebody wrote the parameter since, what he wrote."""
        low = local(self.param)
        self.rest.copy_(torch.where(low == self.rest.to(self.dtype), self.rest, low))
        return whole(self.rest, self.param)

    def store(self, full: Tensor) -> None:
        """Keep `full`, and round it."""
        self.rest.copy_(local(full))  # nothing to do if it is `rest`
        local(self.param).copy_(local(full))


def _become(param: nn.Parameter, value: Tensor) -> None:
    """Give `param` another dtype, and its gradient with it."""
    grad, param.grad = param.grad, None
    param.data = value
    _set_grad_dtype(param)
    if grad is not None:
        param.grad = grad.to(param.grad_dtype)


def _set_grad_dtype(param: nn.Parameter) -> None:
    """fp32 beside fp16, or GradScaler refuses to unscale; else left to follow the parameter."""
    if param.dtype != torch.float16:
        return
    if not is_sharded(param):
        param.grad_dtype = torch.float32
        return
    if param.requires_grad:  # FSDP brings fp16, and then runs such hooks
        param.register_post_accumulate_grad_hook(_widen_grad)  # type: ignore[no-untyped-call]
        _widen_grad(param)


def _widen_grad(param: Tensor) -> None:
    param.grad_dtype = None  # any
    if param.grad is not None:
        param.grad = param.grad.float()


def table(module: nn.Module) -> dict[str, Weight]:
    """The weights that `module` itself owns, by name; changed only by `place`."""
    return {n: w for n, w in _places(module).items() if isinstance(w, Weight) and w.live()}


def _places(module: nn.Module) -> dict[str, Place]:
    places: dict[str, Place] = vars(module).get(TABLE, {})
    return {n: kept for n, kept in places.items() if module._parameters.get(n) is kept.param}


def weights_of(model: nn.Module) -> dict[nn.Parameter, Weight]:
    """The weights of `model` and of its submodules, by parameter."""
    return {w.param: w for module in model.modules() for w in table(module).values()}


def unplaced(model: nn.Module) -> dict[nn.Parameter, Place]:
    """Places for the parameters of `model` that no table has yet."""
    known = {kept.param for module in model.modules() for kept in _places(module).values()}
    return {p: Place(p, p.dtype) for p in model.parameters() if p not in known}


def place(model: nn.Module, places: dict[nn.Parameter, Any]) -> None:
    """Have every module of `model` that owns one of these parameters show and load its weight."""
    for module in model.modules():
        own = {n: places[p] for n, p in module._parameters.items() if p in places}
        if own and TABLE not in vars(module):
            module.register_state_dict_post_hook(_show)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]
        if own:
            vars(module)[TABLE] = _Table(module, vars(module).get(TABLE, {}) | own)


class _Table(dict[str, Place]):
    """What `module` owned when it was made, by name; copies know the module's copy."""

    def __init__(self, module: nn.Module, places: dict[str, Place]) -> None:
        super().__init__(places)
        self.__setstate__(module)

    def __getstate__(self) -> nn.Module | None:
        return self.module()

    def __setstate__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        _tables[id(self)] = self


_tables: "weakref.WeakValueDictionary[int, _Table]" = weakref.WeakValueDictionary()


def find_shards() -> None:
    """Go over to what `fully_shard` has put in the place of parameters."""
    for kept in list(_tables.values()):
        for place in kept.values():
            if isinstance(place, Trained) and is_sharded(place.param):
                place.mark()
        module = kept.module()
        if module is None or _places(module) == kept or not shards.is_managed(module):
            continue
        if any(not is_sharded(place.param) for place in kept.values()):
            shards.put_back(module)
        for name, place in kept.items():
            value = module._parameters.get(name)
            if value is not None and shards.replaces(value, place.param):
                place.shard(value)


def refuse_strangers(optimizer: Optimizer) -> None:
    """Of a parameter with a master weight, a plain step would change the low precision alone.

    Raises `ArgumentError`.
    """
    known = vars(optimizer).get(TABLE, {})
    params = [p for group in optimizer.param_groups for p in group["params"]]
    marked = [p for p, own in zip(params, map(vars, params), strict=True) if MARK in own]
    if any(vars(p)[MARK] == p.dtype and p not in known for p in marked):
        raise ArgumentError(
            "an optimizer that was given to `optimize` with its model",
            f"a {type(optimizer).__name__} on parameters with master weights",
            "Pass it: `model, optimizer = optimize(model, optimizer=optimizer, dtype=...)`. After "
            "fully_shard keep the one that came back: it steps the shards.",
        )


def has_tables() -> bool:
    """Whether any module has weights that are held here."""
    return bool(_tables)


def displaced(params: Collection[Tensor]) -> Iterator[tuple[nn.Module, str]]:
    """Where a low-precision value has come for one with a master weight, and `params` train it.

    So do FSDP1, which flattens parameters, and parametrizations. An ordinary parameter in
    that place is somebody's own choice, and one that only moved (pruning) is still stepped.
    """
    flat = {info.module for p in params for info in getattr(p, "_param_infos", ())}  # FSDP1
    for kept in list(_tables.values()):
        module = kept.module()
        if module is None:
            continue
        for name, weight in kept.items():
            if isinstance(weight, Trained) and _displaced(module, name, weight):
                within = set(module.parameters()) | {weight.param}
                if module in flat or not within.isdisjoint(params):
                    yield module, name


def _displaced(module: nn.Module, name: str, weight: Trained) -> bool:
    if module._parameters.get(name) is weight.param:
        return weight.live() and not weight.stands()
    if not weight.live() or any(p is weight.param for p in module.parameters()):
        return False
    value = getattr(module, name, None)
    if not isinstance(value, Tensor) or value.dtype != weight.dtype:
        return False
    if not is_sharded(weight.param):
        return type(value) is not nn.Parameter
    if not is_sharded(value):  # gathered, or one of tied parameters, whose other was sharded
        return vars(value).get(SHARDED) is weight.param
    return shards.same_mesh(value, weight.param)  # on another between two passes


# Where a weight was last shown: tied modules show one tensor under two names, as torch does.
_shown: "weakref.WeakKeyDictionary[Weight, tuple[Any, str]]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def _show(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
    """State dicts hold full precision: copies, which later steps do not change."""
    _look_for_shards(module)
    for name, weight in table(module).items():
        key = prefix + name
        if key not in state_dict:
            continue
        where, other = _shown.get(weight, (lambda: None, key))
        if where() is state_dict and other != key:
            state_dict[key] = state_dict[other]
            continue
        needs_grad = state_dict[key].requires_grad  # with keep_vars
        state_dict[key] = weight.full().clone().requires_grad_(needs_grad)
        if isinstance(state_dict, OrderedDict):  # a plain dict has no weak references
            _shown[weight] = weakref.ref(state_dict), key


@torch.no_grad()
def _load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Take full precision out of a state dict, and hand torch the low one, which it then checks.

    `assign=True` makes the caller's tensor the parameter: an ordinary one from then on.
    """
    if metadata.get("assign_to_params_buffers", False):
        return
    shards.put_back(module)  # as FSDP does after us
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
            weight.store(_as(weight.param, value.to(weight.param.device, torch.float32)))
            state_dict[prefix + name] = weight.param.detach()


def _is_memory_of(value: Tensor, param: Tensor) -> bool:
    same = value.dtype == param.dtype and value.device == param.device
    return same and not is_sharded(value) and value.data_ptr() == param.data_ptr()


def _look_for_shards(module: nn.Module) -> None:
    if _places(module) != vars(module).get(TABLE, {}):
        find_shards()


def _fits(value: Tensor, param: Tensor) -> bool:
    """What torch would load: the same shape, or the one-element form of old scalars."""
    if is_sharded(value) != is_sharded(param):
        return False  # torch says so
    return value.shape == param.shape or (param.dim() == 0 and value.shape == (1,))


def _as(param: Any, value: Any) -> Tensor:
    """`value` in the shape of `param`, or sharded as that."""
    if is_sharded(param):
        return value.redistribute(param.device_mesh, param.placements)  # type: ignore[no-any-return]
    return value.view(param.shape)  # type: ignore[no-any-return]
