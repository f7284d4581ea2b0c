"""Kernel texts: the `.py.jinja` files of this folder, as Inductor's templates take them.

They are rendered with Inductor's hooks (`def_kernel`, `store_output`, INDEX_DTYPE), or with the
hooks of a caller that renders a kernel alone. Lines that several kernels share are macros of
`_macros.py.jinja`. A call of a macro stands on a line of its own, and is replaced by the macro's
lines with the indentation of the call. This is plain text substitution when a file is read, before
Inductor sees the text: compiling templates with Jinja takes milliseconds each, and the digest of
the whole text is needed at import.
"""

import functools
import re
from pathlib import Path

MACROS = "_macros"
_MACRO = re.compile(r"^\{% macro (\w+)\(\) %\}\n(.*?)^\{% endmacro %\}\n", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"^( *)\{\{ macros\.(\w+)\(\) \}\}\n", re.MULTILINE)
_INDENTED = re.compile(r"^(?!\{%|$)", re.MULTILINE)  # statements of Jinja are not indented


def read_kernel_text(name: str, **values: str) -> str:
    """Return the text of `NAME.py.jinja` with macros expanded and each `{{value}}` filled in."""
    text = _read_expanded(name)
    for key, value in values.items():
        text = text.replace("{{" + key + "}}", value)
    return text


@functools.cache
def macros() -> dict[str, str]:
    """Return the lines of each shared macro, by its name."""
    return dict(_MACRO.findall(_read(MACROS)))


@functools.cache
def _read_expanded(name: str) -> str:
    return _CALL.sub(lambda call: _INDENTED.sub(call[1], macros()[call[2]]), _read(name))


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py.jinja").read_text(encoding="utf-8")
