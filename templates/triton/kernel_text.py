"""Kernel texts: the `.py.jinja` files of this folder, as Inductor's templates take them.

They are rendered with Inductor's hooks (`def_kernel`, `store_output`, INDEX_DTYPE), or with those
of a caller that renders a kernel alone. Lines that several kernels share are macros of
`_macros.py.jinja`, without arguments. A macro is called on a line of its own, and has the names of
the kernel around it. Calls are expanded when the text is read, before Inductor sees it: as plain
text, because Jinja takes milliseconds to compile a kernel, and records name a kernel's text by its
digest.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
MACROS = "_macros"
_MACRO = re.compile(r"^\{% macro (\w+)\(\) %\}\n(.*?)^\{% endmacro %\}\n", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"^( *)\{\{ macros\.(\w+)\(\) \}\}\n", re.MULTILINE)
_VALUE = re.compile(r"\{\{(\w+)\}\}")
_LINE = re.compile(r"^(?!\{%|$)", re.MULTILINE)  # Jinja's statements stay where they are


def read_kernel_text(name: str, **values: str) -> str:
    """Return the text of `NAME.py.jinja` with macros expanded and each `{{value}}` replaced."""
    text = _CALL.sub(lambda call: _LINE.sub(call[1], macros()[call[2]]), _read(name))
    return _VALUE.sub(lambda value: values.get(value[1], value[0]), text) if values else text


@functools.cache
def macros() -> Mapping[str, str]:
    """Return the lines of each shared macro, by its name."""
    return dict(_MACRO.findall(_read(MACROS)))


@functools.cache
def _read(name: str) -> str:
    return (FOLDER / f"{name}.py.jinja").read_text(encoding="utf-8")
