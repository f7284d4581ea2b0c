"""The documentation site: its code runs, its commands exist, its links and navigation are whole."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support import browser
from support.doc_setups import code_to_run

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = ("_generate", "notes")  # folders that are no part of the site
SEARCH = """(() => {
  const toggle = document.querySelector("#__search")
  toggle.checked = true
  toggle.dispatchEvent(new Event("change"))
  const input = document.querySelector(".md-search__input")
  input.focus()
  input.value = "drop_plain_weights"
  input.dispatchEvent(new Event("keyup", {bubbles: true}))
})()"""
LINKS = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
JOURNAL = "journal"  # kept as it was written: not run
BLOCK = re.compile(
    r"^(<!-- not run: (?P<why>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```", re.M | re.S
)


def written() -> list[Path]:
    """Pages that are files, in the order of their names."""
    return sorted(p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).parts[0] not in OUTSIDE)


@cache
def generated() -> dict[str, str]:
    """Pages that are made of the sources, by path."""
    sys.path.insert(0, str(DOCS / "_generate"))
    try:
        import pages
        import results  # noqa: F401

        return pages.pages()
    finally:
        sys.path.remove(str(DOCS / "_generate"))


@cache
def all_pages() -> dict[str, str]:
    """The text of every page of the site by its path in docs/."""
    return {p.relative_to(DOCS).as_posix(): p.read_text() for p in written()} | generated()


def blocks(text: str, kind: str) -> Iterator[tuple[str, str]]:
    """Code blocks of a kind, each with the reason why it is not run."""
    for match in BLOCK.finditer(text):
        if match["kind"] == kind:
            yield match["text"], (match["why"] or "").strip()


def python_pages() -> list[str]:
    """Written pages outside the journal that have Python."""
    names = {p.relative_to(DOCS).as_posix(): p.read_text() for p in written()}
    return [n for n, t in names.items() if "```python\n" in t and not n.startswith(JOURNAL)]


def prose(text: str) -> str:
    """A page without code blocks and code spans, in which brackets are no links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown makes them, and explicit ones."""
    found = set(re.findall(r"\{#([\w-]+)\}", text))
    for heading in re.findall(
        r"^#+ (.+?)(?: \{#.*\})?$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
    ):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.unit
@pytest.mark.parametrize("page", python_pages())
def test_python_blocks_compile(page):
    for text, _ in blocks((DOCS / page).read_text(), "python"):
        compile(text, page, "exec")


# Each page compiles models for some ten seconds. The first code that a visitor reads is tried by
# test_readme_code.py every time.
@pytest.mark.slow
@pytest.mark.usefixtures("instructions_known", "products_known")
@pytest.mark.parametrize("page", python_pages())
def test_python_blocks_run(page, tmp_path):
    """The blocks of a page, one after the other in one program, but for those that say why not."""
    found = [code_to_run(*block) for block in blocks((DOCS / page).read_text(), "python")]
    runs = [code for code in found if code is not None]
    if not runs:
        pytest.skip(f"no block of {page} can run here")
    program = tmp_path / "page.py"
    program.write_text("\n".join(runs))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": path, "IPEX_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def documented_commands() -> Iterator[tuple[str, tuple[str, ...], list[str]]]:
    """The page, the words and all arguments of each `ipex-inductor ...` in the pages' code."""
    for page in written():
        text = page.read_text()
        code = (
            "\n".join(m["text"] for m in BLOCK.finditer(text))
            + "\n"
            + "\n".join(re.findall(r"`(ipex-inductor [^`\n]+)`", text))
        )
        for line in code.splitlines():
            line = line.split(" #")[0]
            if match := re.search(r"(?:^|\s)ipex-inductor (.+)", line):
                words = shlex.split(match[1].rstrip("\\"))
                yield page.name, words, line


@pytest.mark.unit
def test_every_command_exists_with_its_options():
    sys.path.insert(0, str(DOCS / "_generate"))
    import pages

    known = dict(pages.commands())
    seen = 0
    for page, words, line in documented_commands():
        if not re.fullmatch(r"[a-z]+", words[0]):
            continue  # COMMAND --help, ...
        path = (words[0],)
        while len(path) < len(words) and (*path, words[len(path)]) in known:
            path = (*path, words[len(path)])
        assert path in known, f"{page}: {line}"
        if path == ("launch",):
            continue
        options = {o for p in known[path].params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        for word in words:
            if word.startswith("-"):
                assert word.split("=")[0] in options, f"{page}: {line}"
        seen += 1
    assert seen > 40


@pytest.mark.unit
def test_the_reference_has_every_command():
    text = generated()["reference/command-line.md"]
    sys.path.insert(0, str(DOCS / "_generate"))
    import pages

    for path, _ in pages.commands():
        assert f"`ipex-inductor {' '.join(path)}` {{#" in text


@pytest.mark.unit
def test_links_and_anchors_resolve():
    texts = all_pages()
    wrong = []
    for page, text in texts.items():
        for target in re.findall(r"\[[^]]*\]\(([^)\s]+)\)", prose(text)):
            if target.startswith(("http://", "https://")):
                continue
            path, _, anchor = target.partition("#")
            other = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            if other.startswith("assets/") and (DOCS / other).is_file():
                continue
            if other not in texts or (anchor and anchor not in anchors(texts[other])):
                wrong.append(f"{page}: {target}")
    assert not wrong, "\n".join(wrong)


def in_nav() -> set[str]:
    """Paths in the navigation of mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return set(re.findall(r"([\w./-]+\.md)$", text, re.M))


@pytest.mark.unit
def test_the_navigation_has_every_page():
    listed = in_nav()
    files = {
        page for page in all_pages() if page.startswith("results/files/")
    }  # the hook adds these
    assert listed == set(all_pages()) - files


@pytest.mark.unit
def test_paragraphs_are_short():
    for page in written():
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for block in re.split(r"\n\s*\n|\n(?=[-*#|] )", text):
            if not block.lstrip().startswith(("|", "#")):
                assert len(block.split()) <= 110, f"{page.name}: {block[:80]}"
        for line in page.read_text().splitlines():
            assert len(line) <= 300 or line.startswith("|"), f"{page.name}: {line[:80]}"


@pytest.mark.unit
def test_the_tables_of_migrating_are_those_of_the_package():
    from ipex_inductor.ipex_api.ipex_names import PAGE, tables

    text = (ROOT / PAGE).read_text()
    for kind, rows in tables().items():
        shown = re.search(rf"<!-- {kind} -->\n\|[^\n]*\n\|[-|]+\n(.*?)\n<!-- end -->", text, re.S)
        assert shown, kind
        assert shown[1] == rows, kind


@pytest.mark.unit
def test_verified_systems_are_those_of_the_readme():
    generated()
    pages = sys.modules["pages"]

    shown = pages.insert_readme_tables((DOCS / "install.md").read_text())
    assert "<!-- README" not in shown
    assert "| | verified | only compiled |" in shown
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| Python \|.*$", readme, re.M)
    assert len(rows) == 1
    assert rows[0] in shown
    with pytest.raises(LookupError, match="no such heading"):
        pages.insert_readme_tables("<!-- README: no such heading -->")


@pytest.mark.unit
def test_every_own_variable_is_described():
    text = generated()["reference/environment.md"]
    assert "`IPEX_HOME`" in text
    assert "`IPEX_MODE`" in text


@pytest.mark.unit
def test_public_names_are_in_the_reference():
    import ipex_inductor

    text = (DOCS / "reference" / "api.md").read_text()
    for name in ipex_inductor.__all__:
        assert re.search(rf"\b{name}\b", text), name
    import ipex_inductor.optim

    for name in ipex_inductor.optim.__all__:
        assert re.search(rf"\b{name}\b", text), name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install 'ipex-inductor[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.mark.slow  # 30 s; `make check` builds the site
def test_the_strict_build_names_no_other_host(site):
    elsewhere = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?://")
    outside = [str(page) for page in site.rglob("*.html") if elsewhere.search(page.read_text())]
    assert not outside, outside[:5]


def test_search_ranks_guides_before_the_journal(site):
    docs = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    boosts = {doc["location"].partition("#")[0]: doc.get("boost", 1) for doc in docs}
    assert boosts["guides/troubleshooting.html"] == 1
    ranks = ("journal/cpu.html", "results/inference-cpu.html", "internals/capture.html")
    assert [boosts[page] for page in ranks] == [0.1, 0.3, 0.5]


def test_search_works_from_disk(site, tmp_path):
    """Typed into a page that was opened without a server, and nothing is asked of other hosts."""
    if browser.found() is None:
        pytest.skip("no Chromium here")
    with browser.opened(site / "guides" / "cpu.html", tmp_path / "profile") as page:
        page.run(SEARCH)
        deadline = time.monotonic() + 60
        while not (links := page.run(LINKS)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert any("reference/options.html" in link for link in links)
        assert not [r for r in page.requests if not r.startswith(("file:", "data:"))]
        assert not page.logged
