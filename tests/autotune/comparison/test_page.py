"""The page of a comparison, in a browser: sorting, details, plots, and text that stays text."""

import math

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from ipex_inductor.autotune.comparison import page
from ipex_inductor.autotune.database import write
from ipex_inductor.autotune.intensity import intensity
from ipex_inductor.autotune.record import Choice, Operand, Problem
from ipex_inductor.cli import app
from support import browser, html_check
from support.autotune.autotune_records import LIBRARY, PROVENANCE, TILES, failed, record, timed
from support.report_page import read_page_data

pytestmark = pytest.mark.unit

EVIL = '</script><img src=x onerror="window.stolen=1"><b>\'&amp;&'
JINJA = "{{ 7 * 7 }}"

needs_browser = pytest.mark.skipif(
    browser.found() is None, reason=f"none of {', '.join(browser.NAMES)} is installed"
)


def run(*args):
    return CliRunner().invoke(app, ["autotune", "compare", *map(str, args)])


def shares(outcome, rate, bandwidth):
    return replace(outcome, rate=rate, bandwidth=bandwidth)


@pytest.fixture
def sides(tmp_path):
    """Four problems: same, faster, slower and failed; a name that would like to be markup."""
    evil = Choice("library", EVIL + JINJA)
    whose = replace(PROVENANCE, device=EVIL)
    a = [
        record(shares(timed(LIBRARY, 10.0), 0.2, 0.9), rows=1),
        record(shares(timed(LIBRARY, 10.0), 0.4, 0.9), timed(TILES[0], 20.0), rows=2),
        record(timed(LIBRARY, 10.0), rows=3),
        record(timed(evil, 10.0), rows=4, provenance=whose),
    ]
    b = [
        record(shares(timed(LIBRARY, 10.1), 0.2, 0.9), rows=1),
        record(timed(LIBRARY, 20.0), shares(timed(TILES[0], 5.0), 0.8, 0.9), rows=2),
        record(timed(LIBRARY, 20.0), failed(TILES[1], EVIL), rows=3),
        record(failed(evil, EVIL), rows=4, provenance=whose),
    ]
    for name, records in (("a", a), ("b", b)):
        write(tmp_path / f"{name}.jsonl", records)
    return tmp_path / "a.jsonl", tmp_path / "b.jsonl"


def test_what_cannot_be_written_is_said_before_anything_is_read(sides, tmp_path):
    done = run(*sides, "--html", tmp_path / "none" / "page.html")
    assert done.exit_code == 2
    assert "expected --html in a folder that exists" in done.stderr


def test_no_text_of_records_ends_a_block_or_is_a_template(sides, tmp_path):
    done = run(*sides, "--html", tmp_path / "page.html", "--json")
    assert done.exit_code == 1
    text = (tmp_path / "page.html").read_text()
    assert "<img" not in text
    assert text.count("</script>") == 3
    rows = read_page_data(tmp_path / "page.html")["rows"]
    assert EVIL + JINJA in [row["a"]["choice"] for row in rows]


def test_a_page_has_no_more_rows_than_a_browser_can_hold(sides, tmp_path, monkeypatch):
    monkeypatch.setattr("ipex_inductor.cli.autotune.compare.PAGE_ROWS", 2)
    path = tmp_path / "page.html"
    run(*sides, "--html", path)
    assert "lists the first 2 of 4 problems" in path.read_text()
    assert len(read_page_data(path)["rows"]) == 2
    run(*sides, "--html", path, "--all")
    assert len(read_page_data(path)["rows"]) == 4


@pytest.fixture
def page_file(sides, tmp_path):
    run(*sides, "--html", tmp_path / "page.html")
    return tmp_path / "page.html"


def test_the_page_is_valid_and_complete(page_file):
    html_check.check(page_file.read_text())


def test_figures_have_few_digits():
    facts = {"p50": [11.733600124716759, 123456.789, None], "n": 1234567, "ok": True}
    assert page._round(facts) == {"p50": [11.734, 123460.0, None], "n": 1234567, "ok": True}


def test_a_page_of_many_problems_is_small(tmp_path):
    sides = [
        [record(timed(LIBRARY, time), *(timed(t, time + n / 7) for t in TILES), rows=n)]
        for time in (10.0, 11.0)
        for n in range(1, 5001)
    ]
    for name, records in (("a", sides[:5000]), ("b", sides[5000:])):
        write(tmp_path / f"{name}.jsonl", [r for group in records for r in group])
    run(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000


ROWS = "[...document.querySelectorAll('#problems tbody tr.row')]"
VERDICTS = f"{ROWS}.map(row => row.children[1].textContent)"
NAMES = f"{ROWS}.map(row => row.children[0].textContent)"
CLICK = (
    "[...document.querySelectorAll('#problems > thead button')]"
    ".find(b => b.textContent === '{}').click()"
)
DRILL = f"{ROWS}.forEach(row => row.querySelector('button').click())"


@needs_browser
def test_the_page_in_a_browser(page_file, tmp_path):
    with browser.opened(page_file, tmp_path / "profile") as shown:
        names = shown.run(NAMES)
        assert len(names) == 4
        assert names[0] == "aten.mm.default + relu bf16[4x32] bf16[32x16] out_dtype=None on sm_90"
        assert shown.run(VERDICTS)[0] == "No kernel runs in B"
        assert shown.run("document.getElementById('verdict').textContent").startswith("B is worse")

        shown.run(CLICK.format("B ÷ A"))
        ratios = shown.run(f"{ROWS}.map(row => row.children[6].textContent)")
        assert ratios == ["0.500", "1.010", "2.000", ""]
        shown.run(CLICK.format("B ÷ A"))
        assert shown.run(VERDICTS) == [
            "Slower in B",
            "Same kernel",
            "Faster in B",
            "No kernel runs in B",
        ]
        shown.run(CLICK.format("Problem"))
        assert shown.run(NAMES) == sorted(names)

        shown.run(DRILL)
        drilled = shown.run(
            "[...document.querySelectorAll('tr.drilled')].map(row => row.textContent)"
        )
        assert len(drilled) == 4
        assert "tiled flat=False tile=64x64 warps=2" in drilled[1]
        assert EVIL + JINJA in drilled[3]
        assert shown.run(f"{ROWS}[3].nextElementSibling.querySelectorAll('table').length") == 2
        assert shown.run("document.querySelectorAll('tr.drilled .bar').length") >= 6
        shown.run(DRILL)
        assert shown.run("document.querySelectorAll('tr.drilled').length") == 0

        assert shown.run("document.querySelectorAll('#speed .point').length") == 3
        assert shown.run("document.querySelectorAll('#roof .point').length") == 4
        assert shown.run("document.querySelectorAll('#roof .roof').length") == 1
        note = shown.run("document.getElementById('roof-note').textContent")
        assert "2 of 4 problems are not drawn" in note

        assert shown.run("window.stolen") is None
        assert shown.run("document.querySelectorAll('img').length") == 0
        assert shown.requests == [page_file.as_uri()]
        assert shown.logged == []


@needs_browser
def test_rows_are_filtered_by_text_and_by_change(page_file, tmp_path):
    with browser.opened(page_file, tmp_path / "profile") as shown:
        change = "{{ const e = document.getElementById('{}'); e.value = '{}';"
        change += " e.dispatchEvent(new Event('input')) }}"
        shown.run(change.format("wanted", "[3X32]"))
        assert shown.run(VERDICTS) == ["Slower in B"]
        shown.run(change.format("change", "Faster in B"))
        assert shown.run(VERDICTS) == []
        shown.run(change.format("wanted", ""))
        assert shown.run(VERDICTS) == ["Faster in B"]
        assert shown.run("document.getElementById('shown').textContent") == "1 of 4 problems"


@needs_browser
def test_every_width_colour_scheme_and_key_is_served(page_file, tmp_path):
    with browser.opened(page_file, tmp_path / "profile") as shown:
        shown.run(DRILL)
        html_check.check_in_browser(shown)
        shown.run(f"{ROWS}[0].querySelector('button').focus()")
        before = shown.run("document.querySelectorAll('tr.drilled').length")
        shown.press("Enter", "\r")
        assert shown.run("document.querySelectorAll('tr.drilled').length") == before - 1


@needs_browser
def test_a_page_without_data_for_plots_says_so(sides, tmp_path):
    write(tmp_path / "other.jsonl", [record(arch="sm_80")])
    path = tmp_path / "page.html"
    assert run(sides[0], tmp_path / "other.jsonl", "--html", path).exit_code == 2
    with browser.opened(path, tmp_path / "profile") as shown:
        text = shown.run("document.body.textContent")
        assert "A is of sm_90, B of sm_80" in text
        assert "nothing to plot" in text
        assert shown.logged == []


def problem(op, *shapes, **constants):
    operands = tuple(Operand(shape, (), "float32") for shape in shapes)
    return Problem(f"aten.{op}.default", operands, "sm_90", constants)


WINDOW = {"stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)}


@pytest.mark.parametrize(
    ("given", "operations", "elements"),
    [
        (problem("mm", (64, 32), (32, 16)), 2 * 64 * 32 * 16, 64 * 32 + 32 * 16 + 64 * 16),
        (problem("addmm", (16,), (64, 32), (32, 16)), 65536, 16 + 2048 + 512 + 1024),
        (  # the operands of an epilogue are read too, and are no factors
            problem("addmm", (16,), (64, 32), (32, 16), (64, 16)),
            65536,
            16 + 2048 + 512 + 1024 + 1024,
        ),
        (problem("mm", (8, 8), (8, 8), (8, 8)), 2 * 8**3, 4 * 64),
        (problem("bmm", (3, 4, 5), (3, 5, 6)), 2 * 3 * 4 * 5 * 6, 60 + 90 + 72),
        (problem("linear", (2, 4, 5), (6, 5), (6,)), 2 * 8 * 5 * 6, 40 + 30 + 6 + 48),
        (
            problem("convolution", (1, 4, 9, 9), (8, 2, 3, 3), groups=2, **WINDOW),
            2 * 8 * 25 * 2 * 9,
            4 * 81 + 8 * 18 + 8 * 25,
        ),
    ],
    ids=lambda v: v.op if isinstance(v, Problem) else "",
)
def test_intensity_counts_each_byte_once(given, operations, elements):
    assert intensity(given) == pytest.approx(operations / (4 * elements))
    assert math.isfinite(intensity(given))


@pytest.mark.parametrize(
    "given",
    [
        problem("relu", (4, 4)),
        problem("mm", ("s0", 32), (32, 16)),
        problem("mm", (64, 31), (32, 16)),
        problem("mm", (64, 32)),
        problem("mm", (), ()),
        problem("mm", (0, 0), (0, 0)),
        problem("linear", (), ()),
        problem("convolution", (1, 4, 9, 9), (8, 4, 3, 3)),
        problem("convolution", (1, 4, 9, 9), (8, 4, 3, 3), **WINDOW | {"stride": (0, 0)}),
        problem("convolution", (1, 4, 1, 1), (8, 4, 9, 9), **WINDOW),
        problem("convolution", (1, 4, 9), (8, 4, 3, 3), **WINDOW),
        problem("convolution", (1, 4, 9, 9), (8, 4, 3, 3), transposed=True, **WINDOW),
        replace(problem("mm", (4, 4), (4, 4)), operands=(Operand((4, 4), (), "?"),) * 2),
    ],
)
def test_what_has_no_known_intensity_has_none(given):
    assert intensity(given) is None
