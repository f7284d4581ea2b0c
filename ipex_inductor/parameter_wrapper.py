"""What IPEX's internals knew of a parameter, for programs that ask them.

Nothing is wrapped here: the answers come from what `optimize` would cast, and from what it has.
"""

from collections.abc import MutableMapping

import torch
from torch import Tensor, nn

from ipex_inductor.frontend.casting import CASTS, ORIGINALS
from ipex_inductor.optim import FUSED_OPTIMIZERS
from ipex_inductor.optim.weights import Master, Rounded, Split, Weight, weights_of

IPEX_FUSED_OPTIMIZER_LIST = sorted(FUSED_OPTIMIZERS, key=lambda kind: kind.__name__)


class ParameterWrapper:
    """One parameter of a model: who owns it, and how `optimize` holds it."""

    def __init__(self) -> None:
        self.modules_cls: set[type] = set()
        self.num_modules = 0
        self.parameter: nn.Parameter | None = None
        self.weight: Weight | None = None  # how it is held, None as it was

    @property
    def casted_dtype(self) -> torch.dtype | None:
        """The low precision it is held in, None if it is not cast."""
        return self.weight.param.dtype if self.weight else None

    @property
    def original_dtype(self) -> torch.dtype | None:
        """What it was before, which state dicts show; None if it is not cast."""
        if isinstance(self.weight, Rounded):
            return self.weight.public
        return torch.float32 if self.weight else None

    @property
    def split(self) -> bool | None:
        """Whether training keeps its lower half beside it; None if it is not cast for training."""
        return isinstance(self.weight, Split) if isinstance(self.weight, (Split, Master)) else None

    @property
    def master_parameter(self) -> Tensor | None:
        """The fp32 value that training keeps beside it."""
        return self.weight.full() if isinstance(self.weight, Master) else None

    @property
    def parameter_trail(self) -> Tensor | None:
        """The lower half that training keeps beside it, its bits as bf16."""
        return self.weight.rest.view(torch.bfloat16) if isinstance(self.weight, Split) else None

    def can_cast_training(self, dtype: torch.dtype, device_type: str = "cpu") -> bool:
        """See the function of this name."""
        return can_cast_training(self, dtype, device_type)

    def can_cast_inference(self, dtype: torch.dtype, device_type: str = "cpu") -> bool:
        """Whether `optimize(model, dtype)` casts it for inference."""
        return _can_cast(self, dtype, device_type, "inference")


def can_cast_training(
    wrapper: ParameterWrapper, dtype: torch.dtype, device_type: str = "cpu"
) -> bool:
    """Whether `optimize(model, dtype, optimizer)` casts the parameter.

    It is fp32 (or held in `dtype` already), and every module that owns it is of a listed class.
    """
    return _can_cast(wrapper, dtype, device_type, "training")


def get_shared_parameter_status(
    module: nn.Module, shared_p: MutableMapping[nn.Parameter, ParameterWrapper]
) -> None:
    """Fill `shared_p` with a wrapper for every parameter of `module`.

    Parameters of one module have their classes in common: where one cannot be cast, none is.
    """
    held = weights_of(module)
    lists: dict[nn.Module, type] = {}
    for owner in module.modules():
        kind = lists.get(owner, type(owner))  # a list of parameters belongs to who holds it
        lists |= {c: type(owner) for c in owner.children() if isinstance(c, nn.ParameterList)}
        for param in owner.parameters(recurse=False):
            wrapper = shared_p.setdefault(param, ParameterWrapper())
            wrapper.parameter, wrapper.weight = param, held.get(param)
            wrapper.modules_cls.add(kind)
            wrapper.num_modules += 1
    for owner in module.modules():
        own = [shared_p[p] for p in owner.parameters(recurse=False)]
        classes: set[type] = set().union(*(wrapper.modules_cls for wrapper in own))
        for wrapper in own:
            wrapper.modules_cls = classes


def IPEX_WEIGHT_CONVERT_MODULE_CPU(inference: bool, dtype: torch.dtype) -> list[type]:
    """Classes of `torch.nn` whose parameters `optimize` casts on CPUs."""
    return _classes("cpu", inference, dtype)


def IPEX_WEIGHT_CONVERT_MODULE_XPU(inference: bool, dtype: torch.dtype) -> list[type]:
    """Classes of `torch.nn` whose parameters `optimize` casts on GPUs."""
    return _classes("xpu", inference, dtype)


def _classes(device_type: str, inference: bool, dtype: torch.dtype) -> list[type]:
    on_cpu = f"cpu {str(dtype).removeprefix('torch.')}"
    lists = CASTS["inference" if inference else "training"]
    listed = lists[on_cpu if device_type == "cpu" else "gpu"]
    return [getattr(nn, name) for name in sorted(listed) if "." not in name]


def _can_cast(wrapper: ParameterWrapper, dtype: torch.dtype, device_type: str, phase: str) -> bool:
    if wrapper.casted_dtype is not None:
        return wrapper.casted_dtype == dtype
    if wrapper.parameter is None or wrapper.parameter.dtype not in ORIGINALS[phase]:
        return False
    return wrapper.modules_cls <= {*_classes(device_type, phase == "inference", dtype)}
