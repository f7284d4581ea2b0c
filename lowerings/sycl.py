"""`ipex::sycl_*` on the CPU: whether this machine has the kernels that a graph would call.

The operators are calls to Inductor; templates/sycl/calls.py is what they run.
"""

import torch

from ipex_inductor.errors import SyclAbsentError, SyclError


def installed() -> str:
    """What runs kernels here, in words."""
    from ipex_inductor.templates.sycl import wheels

    try:
        here = wheels.runtime()
    except SyclAbsentError:
        return "absent"
    return f"{here.named}, CPU device {here.cpu_version or 'absent'}"


def register() -> None:
    """Put the kernels behind the operators."""
    from ipex_inductor.templates.sycl import calls

    calls.register()


def why_not(dtype: torch.dtype, gather: str, few: bool, binary: str, unary: str) -> str:
    """Why there is no kernel here, or ""; it is compiled and loaded, unless it was before.

    `gather`: "rows", "window", or "groups"; `few`: it is for one row.
    """
    from ipex_inductor.templates.sycl import calls
    from ipex_inductor.templates.sycl.device import device_of
    from ipex_inductor.templates.sycl.kernel import DTYPES
    from ipex_inductor.templates.sycl.product import Epilogue

    if dtype not in DTYPES:
        return f"no kernel in SYCL is for {dtype}"
    word, epilogue = DTYPES[dtype], Epilogue(binary, unary)
    try:
        device = device_of(torch.device("cpu"))
        if gather in calls.GATHERS:
            _, made = calls.source_of(device, word, gather, few, epilogue)
        else:
            made = calls.source_of_groups(word, epilogue)
        device.load(made)
    except SyclError as error:
        return str(error).partition("\n")[0]
    return ""
