"""MkDocs hook: add the generated pages to the site and to its navigation."""

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
