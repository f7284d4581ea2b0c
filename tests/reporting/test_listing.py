"""Tables where they fit, records where they do not, plain lines where there is no terminal."""

import io
import subprocess
import sys

import pytest
from rich.console import Console
from rich.text import Text

from ipex_inductor.reporting.listing import Listing, number, show

pytestmark = pytest.mark.unit

PATH = "/home/somebody/a/rather/long/folder/of/models/with/a/name/model.py:7 in forward"
WHY = "torch 2.13.0+cpu, triton 3.6.0, and more that makes a line too long for any terminal " * 2
ROWS = [
    ("9f3c1a5b7d2e", "graph", "12.5 MiB", WHY.strip(), PATH),
    ("0a1b2c3d4e5f", "kernel", "3 KiB", "made for another kind of processor than this one", ""),
]
HEADS = ("entry", "kind", number("size"), "made with, or why it is bad", "where")
FRAMES = set("\u2500\u2501\u2502\u2503\u2576\u2574\u2578\u257a")


def shown(width, rows=ROWS, heads=HEADS, terminal=True, title=""):
    listing = Listing(*heads, title=title)
    for row in rows:
        listing.add_row(*row)
    file = io.StringIO()
    show(Console(file=file, width=width, force_terminal=terminal, color_system=None), listing)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def words(lines):
    return " ".join(lines).replace("\n", " ").split()


@pytest.mark.parametrize("width", [40, 80])
def test_what_does_not_fit_is_a_list_of_records(width):
    lines = shown(width)
    assert not FRAMES & set("".join(lines))
    assert lines[:3] == ["entry: 9f3c1a5b7d2e", "kind: graph", "size: 12.5 MiB"]
    assert lines.count("") == 1  # between two records
    assert "where:" not in [line for line in lines[lines.index("") :] if line.startswith("where")]
    assert max(map(len, lines)) <= width


def test_a_table_where_there_is_room():
    lines = shown(200, [(*row[:3], row[3][:29], row[4]) for row in ROWS])
    assert FRAMES & set(lines[1])
    assert len(lines) == 4  # heads, a line, and a line for each row
    assert PATH in lines[2]
    assert lines[2].index("12.5 MiB") + len("12.5 MiB") == lines[3].index("3 KiB") + len("3 KiB")


@pytest.mark.parametrize("width", [80, 100])
def test_words_are_wrapped_and_never_broken_in_a_table(width):
    rows = [
        ("linear+gelu", "the weight is a parameter and the input has at most sixteen rows " * 2)
    ]
    lines = shown(width, rows, ("what", "why"))
    assert FRAMES & set(lines[1])
    assert set(words(lines[2:])) == set(words(rows[0]))


def test_cells_of_many_lines_make_records():
    rows = [("linear+gelu", "a reason " * 60)]
    assert not FRAMES & set("".join(shown(80, rows, ("what", "why"))))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_without_a_terminal_nothing_is_cut_folded_or_framed(width):
    lines = shown(width, terminal=False)
    assert not FRAMES & set("".join(lines))
    assert lines == shown(80, terminal=False)
    assert f"where: {PATH}" in lines
    short = shown(width, [row[:3] for row in ROWS], HEADS[:3], terminal=False, title="cache")
    assert short == [
        "cache",
        "entry         kind        size",
        "9f3c1a5b7d2e  graph   12.5 MiB",
        "0a1b2c3d4e5f  kernel     3 KiB",
    ]


def test_lines_of_a_cell_stay_lines():
    rows = [("relu", "model.py:7 in forward\nmodel.py:9 in forward")]
    assert shown(80, rows, ("what", "where"), terminal=False) == [
        *("what: relu", "where:", "  model.py:7 in forward", "  model.py:9 in forward")
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_no_rows(terminal):
    assert shown(80, [], terminal=terminal)[0].split()[0] == "entry"


def test_texts_keep_their_styles_and_nothing_is_markup():
    listing = Listing("[bold]head[/bold]", "what")
    listing.add_row(Text("[red]", "green"), "[link=x]")
    for terminal in (True, False):
        file = io.StringIO()
        show(Console(file=file, width=80, force_terminal=terminal, color_system=None), listing)
        assert all(each in file.getvalue() for each in ("[bold]", "[red]", "[link=x]"))


COMMANDS = ["config", "doctor", "cache ls", "cache stats", "cache why"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_every_command_in_a_pipe(command, tmp_path):
    for columns in ("40", "200"):
        done = subprocess.run(
            [sys.executable, "-m", "ipex_inductor", *command.split()],
            env={"PATH": "/usr/bin:/bin", "COLUMNS": columns, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 1), done.stderr
        assert not FRAMES & set(done.stdout)
