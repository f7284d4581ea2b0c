"""Files of kernels in Triton: each is read by one module, and shared macros by several kernels."""

import re
from collections import Counter
from pathlib import Path

import pytest

from ipex_inductor.templates import kernel_text

pytestmark = pytest.mark.unit

FOLDER = Path(kernel_text.__file__).parent
FILES = {
    file.relative_to(FOLDER).as_posix(): file.read_text(encoding="utf-8")
    for file in sorted(FOLDER.glob("*/*.py.jinja"))
}
SHARED = f"triton/{kernel_text.MACROS}"
INDUCTORS = [path for path in FILES if path.startswith("triton/") and path != SHARED]
MACRO = re.compile(r"^\{% macro (\w+)\((.*)\) %\}$", re.MULTILINE)
VALUE = re.compile(r"\{\{(\w+)\}\}")


def test_each_file_is_read_by_one_module():
    modules = (path.read_text(encoding="utf-8") for path in FOLDER.glob("*/*.py"))
    readers = Counter(
        path for text in modules for path in {*re.findall(r'"(\w+/\w+\.py\.jinja)"', text)}
    )
    assert readers == dict.fromkeys(FILES.keys() - {SHARED}, 1)


def test_each_shared_macro_is_called_in_several_places():
    """Of several kernels, or of one."""
    calls = Counter(
        name for path in INDUCTORS for name in re.findall(r"macros\.(\w+)", FILES[path])
    )
    assert calls.keys() == kernel_text.read_macros(SHARED).keys()
    assert min(calls.values()) > 1


@pytest.mark.parametrize("path", FILES)
def test_lines_are_tidy(path):
    text = FILES[path]
    assert "\t" not in text
    assert text.endswith("\n")
    assert [line for line in text.splitlines() if line != line.rstrip() or len(line) > 100] == []


@pytest.mark.parametrize("path", INDUCTORS)
def test_all_calls_are_expanded(path):
    text = kernel_text.read_kernel_text(path)
    assert "macros." not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("path", [path for path in FILES if path.startswith("optimizer/")])
def test_macros_name_the_values_that_they_need(path):
    named = {name: {*filter(None, each.split(", "))} for name, each in MACRO.findall(FILES[path])}
    macros = kernel_text.read_macros(path)
    assert named == {name: {*VALUE.findall(text)} for name, text in macros.items()}
    module = (FOLDER / path.removesuffix(".jinja")).read_text(encoding="utf-8")
    assert {*re.findall(r'_fill\(\s*"(\w+)"', module)} == macros.keys()


def test_a_macro_takes_the_indentation_of_its_call_but_not_its_statements(tmp_path):
    kernel = "{{def_kernel()}}\n    {{ macros.load() }}\n    y = {{y}}\n    z = {{z}}\n"
    macro = "{%- if A %}\nx = 1\n\nif x:\n    x = 2\n{%- endif %}\n"
    (tmp_path / "faulty_tuner.py.jinja").write_text(kernel)
    (tmp_path / kernel_text.MACROS).write_text(
        f"{{# why #}}\n{{% macro load() %}}\n{macro}{{% endmacro %}}\n"
    )
    text = kernel_text.read_kernel_text(str(tmp_path / "faulty_tuner.py.jinja"))
    assert kernel_text.fill_values(text, y=1) == (
        "{{def_kernel()}}\n{%- if A %}\n    x = 1\n\n    if x:\n        x = 2\n{%- endif %}\n"
        "    y = 1\n    z = {{z}}\n"
    )
