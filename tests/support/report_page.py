"""Read the page that compares autotune databases."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any


def read_page_data(page: Path) -> Any:
    """Return what the page decompresses."""
    block = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(zlib.decompress(base64.b64decode(block)))
