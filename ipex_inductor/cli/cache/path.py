"""`ipex-inductor cache path`: print the folder of the kernel cache."""

from ipex_inductor.aot_cache.cache_root import state
from ipex_inductor.aot_cache.store import default_folder
from ipex_inductor.cli.shared import AsJson, say, say_json


def cache_path(as_json: AsJson = False) -> None:
    """Print the folder of the kernel cache; a second line says why it is not used, if it is not."""
    root = state(default_folder())
    if as_json:
        facts = {"path": str(root.path), "exists": root.exists, "usable": root.usable}
        say_json(facts | {"reason": root.reason})
    else:
        say(str(root.path), *([f"not used: {root.reason}"] if root.reason else []))
