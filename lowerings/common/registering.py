"""Registration of lowerings with Inductor."""

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.lowering import register_lowering

from ipex_inductor.ops.common.defining import Arguments, name_arguments


def register_by_name(overload: torch._ops.OpOverload, lower: Callable[[Arguments], object]) -> None:
    """Register a function of an op's arguments by name as its lowering in Inductor's table."""

    def lower_call(*args: Any, **named: Any) -> object:
        return lower(name_arguments(overload, args, named))

    register_lowering(overload, type_promotion_kind=None)(lower_call)
