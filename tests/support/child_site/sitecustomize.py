"""What processes that tests start begin with: conftest.py has this folder in their path."""

import gc
import os

# As in conftest.py: else all that torch imported is walked time and again.
gc.set_threshold(100_000, 10, 10)


def _read_one_element(interpreter):
    """Make Triton's interpreter read an integer from an array of one element.

    Triton 3.6, which torch 2.11 pins, calls `int` on it. NumPy allows that below 2.4 only.
    """
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _read_one_element(interpreter)
