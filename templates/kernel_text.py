"""Texts of Triton kernels, from `.py.jinja` files named by their paths below `templates/`.

Those of `triton/` are for Inductor's templates: they are rendered with its hooks (`def_kernel`,
`store_output`, INDEX_DTYPE), or with the hooks of a caller that renders a kernel alone. Lines that
several of them share are macros of `_macros.py.jinja`. A call of a macro stands on a line of its
own, and is replaced by the macro's lines with the indentation of the call.

Macros and values are substituted as plain text when a file is read, before Inductor sees the text:
compiling templates with Jinja takes milliseconds each, and the digest of the whole text is needed
at import.
"""

import functools
import re
from pathlib import Path

MACROS = "_macros.py.jinja"
_MACRO = re.compile(
    r"^\{% macro (\w+)\([\w, ]*\) %\}\n(.*?)^\{% endmacro %\}\n", re.DOTALL | re.MULTILINE
)
_CALL = re.compile(r"^( *)\{\{ macros\.(\w+)\(\) \}\}\n", re.MULTILINE)
_INDENTED = re.compile(r"^(?!\{%|$)", re.MULTILINE)  # statements of Jinja are not indented


@functools.cache
def read_kernel_text(path: str) -> str:
    """Return the text of a file, with the macros of its folder expanded."""
    macros = str(Path(path).with_name(MACROS))
    return _CALL.sub(lambda call: _INDENTED.sub(call[1], read_macros(macros)[call[2]]), _read(path))


@functools.cache
def read_macros(path: str) -> dict[str, str]:
    """Return the lines of each macro of a file, by its name."""
    return dict(_MACRO.findall(_read(path)))


def fill_values(text: str, **values: object) -> str:
    """Return the text with each `{{name}}` of a value replaced by the value."""
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", str(value))
    return text


def fill_macro(path: str, macro: str, /, **values: object) -> str:
    """Return the lines of a macro of a file with each `{{name}}` of a value replaced by it."""
    return fill_values(read_macros(path)[macro], **values)


def _read(path: str) -> str:
    return (Path(__file__).parent / path).read_text(encoding="utf-8")
