"""HTML pages in one file: templates of a folder on top of the shared `page.html.jinja`.

The shared template holds the styles (light, dark, print, narrow screens) and the script that sorts
tables. Pages load nothing: their Content-Security-Policy allows inline styles and scripts only.
"""

from pathlib import Path
from typing import Any


def render_page(template: Path, facts: dict[str, Any]) -> str:
    """Return the page of this template, which may extend and import the shared ones.

    Strings in `facts` are escaped unless the template marks them as safe.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(facts)
