"""The only way to memory that torch and CPython keep private: fields of tensors, C functions.

`layout` finds the fields that C++ reads, and verifies them on tensors whose values are known.
`accessors.py` finds the definitions of torch's C functions. With `IPEX_PRIVATE_MEMORY=0`, and
where a check fails, callers read through torch's public calls instead. See "Private memory" in
docs/internals/weights.md.
"""

import functools

from ipex_inductor.compat.private_memory import fields
from ipex_inductor.compat.private_memory.accessors import WORD as WORD
from ipex_inductor.compat.private_memory.accessors import (
    attribute_definition as attribute_definition,
)
from ipex_inductor.compat.private_memory.accessors import export_definitions as export_definitions
from ipex_inductor.compat.private_memory.accessors import method_definition as method_definition
from ipex_inductor.compat.private_memory.accessors import open_storage as open_storage
from ipex_inductor.compat.private_memory.accessors import tensor_data as tensor_data
from ipex_inductor.compat.private_memory.fields import GRADIENT as GRADIENT
from ipex_inductor.compat.private_memory.fields import Layout as Layout
from ipex_inductor.compat.private_memory.switch import why_not as why_not


@functools.cache
def layout() -> Layout | str:
    """Return where torch keeps the fields of a tensor, or the reason why they are not read."""
    try:
        return why_not() or fields.find_layout()
    except fields.LayoutError as error:
        return str(error)
