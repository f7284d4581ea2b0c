"""Files of kernels in Triton: each is read by one module, and macros are shared."""

import re
from collections import Counter
from pathlib import Path

import pytest
from rendered import kernel_files

from ipex_inductor.templates.triton import kernel_text

FOLDER = Path(kernel_text.__file__).parent
FILES = sorted(file.name.removesuffix(".py.jinja") for file in FOLDER.glob("*.py.jinja"))
KERNELS = [name for name in FILES if name != kernel_text.MACROS]


def text_of(name):
    return (FOLDER / f"{name}.py.jinja").read_text(encoding="utf-8")


def test_each_file_is_read_by_one_module():
    readers = Counter(name for names in kernel_files().values() for name in names)
    assert readers == dict.fromkeys(KERNELS, 1)


def test_each_macro_is_called_by_several_kernels():
    calls = Counter(
        name for kernel in KERNELS for name in {*re.findall(r"macros\.(\w+)", text_of(kernel))}
    )
    assert calls.keys() == kernel_text.macros().keys()
    assert min(calls.values()) > 1


@pytest.mark.parametrize("name", FILES)
def test_lines_are_tidy(name):
    text = text_of(name)
    assert "\t" not in text
    assert text.endswith("\n")
    lines = text.splitlines()
    assert [line for line in lines if line != line.rstrip() or len(line) > 100] == []


@pytest.mark.parametrize("name", KERNELS)
def test_all_calls_are_expanded(name):
    text = kernel_text.read_kernel_text(name)
    assert "macros." not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_a_macro_takes_the_indentation_of_its_call_but_not_its_statements(monkeypatch, tmp_path):
    files = {
        "kernel": "{{def_kernel()}}\n    {{ macros.load() }}\n    y = {{y}}\n    z = {{z}}\n",
        kernel_text.MACROS: "{#- what -#}\n\n{% macro load() %}\n{%- if A %}\nx = 1\n\n"
        "if x:\n    x = 2\n{%- endif %}\n{% endmacro %}\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py.jinja").write_text(text)
    monkeypatch.setattr(kernel_text, "__file__", str(tmp_path / "kernel_text.py"))
    kernel_text.macros.cache_clear()
    try:
        text = kernel_text.read_kernel_text("kernel", y="1")
    finally:
        kernel_text.macros.cache_clear()
        kernel_text._read_expanded.cache_clear()
    assert text == (
        "{{def_kernel()}}\n{%- if A %}\n    x = 1\n\n    if x:\n        x = 2\n{%- endif %}\n"
        "    y = 1\n    z = {{z}}\n"
    )
