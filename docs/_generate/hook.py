"""MkDocs hook: add the generated pages to the site and its navigation, and tables of the README."""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import pages  # noqa: E402
import results  # noqa: E402, F401 (mkdocs takes the folder off sys.path after the import)


def on_config(config: Any) -> Any:
    """List the pages of results, as many as there are files, in the navigation."""
    for section in config["nav"]:
        if "Results" in section:
            files = sorted(pages.RESULTS.glob("*.jsonl"))
            section["Results"].append(
                {"Files": [f"results/files/{path.stem}.md" for path in files]}
            )
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


# Guides and reference pages come first in the search: they answer questions of users, and are short.
SEARCH_BOOST = {"internals/": 0.5, "results/": 0.3, "journal/": 0.1}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the tables of the README, and rank the page in the search."""
    for folder, boost in SEARCH_BOOST.items():
        if page.file.src_uri.startswith(folder):
            page.meta.setdefault("search", {"boost": boost})
    return pages.insert_readme_tables(markdown)
