"""The switch of every read of torch's private memory, and the Pythons that allow it."""

import functools
import os
import sys

from ipex_inductor.errors import OptionError


@functools.cache
def why_not() -> str:
    """Return why this process does not read torch's private memory; "" if it does.

    Raises:
        OptionError: if the variable is neither 0 nor 1.
    """
    value = os.environ.get("IPEX_PRIVATE_MEMORY") or "1"
    if value not in ("0", "1"):
        raise OptionError("IPEX_PRIVATE_MEMORY to be 0 or 1", repr(value), "Unset or fix it.")
    if value == "0":
        return "IPEX_PRIVATE_MEMORY is 0"
    if sys.implementation.name != "cpython":
        return f"the layout of objects is CPython's, and this Python is {sys.implementation.name}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python has no lock that keeps objects as they are"
    return ""
