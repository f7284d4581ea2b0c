"""IPEX's internal view of a parameter, for programs that query it.

Nothing is wrapped: the answers come from what `optimize` would cast, and from its state.
"""

from collections.abc import Collection, MutableMapping

import torch
from torch import Tensor, nn

from ipex_inductor.frontend.casting import CASTS, Group, groups_of
from ipex_inductor.optim import FUSED_OPTIMIZERS
from ipex_inductor.optim.weights import Master, Rounded, Split, Weight, weights_of

IPEX_FUSED_OPTIMIZER_LIST = sorted(FUSED_OPTIMIZERS, key=lambda kind: kind.__name__)


class ParameterWrapper:
    """One parameter of a model: its owning modules, and how `optimize` stores it."""

    def __init__(self) -> None:
        self.modules_cls: set[type] = set()
        self.num_modules = 0
        self.parameter: nn.Parameter | None = None
        self.weight: Weight | None = None  # how it is stored; None: unchanged
        self.group: Group | None = None  # parameters that are cast together
        self.held: Collection[nn.Parameter] = ()  # parameters of the model already in low precision

    @property
    def casted_dtype(self) -> torch.dtype | None:
        """Return its low-precision dtype, None if it is not cast."""
        return self.weight.param.dtype if self.weight else None

    @property
    def original_dtype(self) -> torch.dtype | None:
        """Return its dtype before casting, which state dicts show; None if it is not cast."""
        if isinstance(self.weight, Rounded):
            return self.weight.public
        return torch.float32 if self.weight else None

    @property
    def split(self) -> bool | None:
        """Return True if training stores its lower half separately; None if not cast."""
        return isinstance(self.weight, Split) if isinstance(self.weight, (Split, Master)) else None

    @property
    def master_parameter(self) -> Tensor | None:
        """Return the fp32 master value that training keeps, or None."""
        return self.weight.full() if isinstance(self.weight, Master) else None

    @property
    def parameter_trail(self) -> Tensor | None:
        """Return the lower half that training keeps, its bits viewed as bf16, or None."""
        return self.weight.rest.view(torch.bfloat16) if isinstance(self.weight, Split) else None

    def can_cast_training(self, dtype: torch.dtype, device_type: str = "cpu") -> bool:
        """Return True if training casts it; see the function of this name."""
        return can_cast_training(self, dtype, device_type)

    def can_cast_inference(self, dtype: torch.dtype, device_type: str = "cpu") -> bool:
        """Return True if `optimize(model, dtype)` casts it for inference."""
        return _can_cast(self, dtype, device_type, "inference")


def can_cast_training(
    wrapper: ParameterWrapper, dtype: torch.dtype, device_type: str = "cpu"
) -> bool:
    """Return True if `optimize(model, dtype, optimizer)` casts the parameter.

    It must be fp32 (or in low precision already), and every module that owns it, or shares
    parameters with an owner, must be of a listed class.
    """
    return _can_cast(wrapper, dtype, device_type, "training")


def get_shared_parameter_status(
    module: nn.Module, shared_p: MutableMapping[nn.Parameter, ParameterWrapper]
) -> None:
    """Fill `shared_p` with a wrapper for every parameter of `module`.

    Parameters of one module, and of modules that share one, have their classes in common: if one of
    them cannot be cast, none is.
    """
    held = weights_of(module)
    for group in groups_of(module):
        for param in group.params:
            wrapper = shared_p.setdefault(param, ParameterWrapper())
            wrapper.parameter, wrapper.weight = param, held.get(param)
            wrapper.modules_cls, wrapper.group, wrapper.held = {*group.classes}, group, held.keys()
    for owner in module.modules():
        for param in owner.parameters(recurse=False):
            shared_p[param].num_modules += 1


def IPEX_WEIGHT_CONVERT_MODULE_CPU(inference: bool, dtype: torch.dtype) -> list[type]:
    """Return the classes of `torch.nn` whose parameters `optimize` casts on CPUs."""
    return _classes("cpu", inference, dtype)


def IPEX_WEIGHT_CONVERT_MODULE_XPU(inference: bool, dtype: torch.dtype) -> list[type]:
    """Return the classes of `torch.nn` whose parameters `optimize` casts on GPUs."""
    return _classes("xpu", inference, dtype)


def _classes(device_type: str, inference: bool, dtype: torch.dtype) -> list[type]:
    on_cpu = f"cpu {str(dtype).removeprefix('torch.')}"
    lists = CASTS["inference" if inference else "training"]
    listed = lists[on_cpu if device_type == "cpu" else "gpu"]
    return [getattr(nn, name) for name in sorted(listed) if "." not in name]


def _can_cast(wrapper: ParameterWrapper, dtype: torch.dtype, device_type: str, phase: str) -> bool:
    """Return True if `optimize` would cast the parameter with all that shares modules with it."""
    if wrapper.parameter is None:
        return False
    params = wrapper.group.params if wrapper.group else frozenset({wrapper.parameter})
    group = Group(frozenset(wrapper.modules_cls), params)
    return group.fits(dtype, device_type, phase, wrapper.held)
