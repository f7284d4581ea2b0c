"""`ipex-inductor cache path`: where kernels are kept."""

from ipex_inductor.aot_cache.cache_root import state
from ipex_inductor.aot_cache.store import default_folder
from ipex_inductor.cli.autotune_shared import AsJson, say, say_json


def cache_path(as_json: AsJson = False) -> None:
    """The folder of the kernel cache; a second line says why it is not used, if it is not."""
    found = state(default_folder())
    if as_json:
        facts = {"path": str(found.path), "exists": found.exists, "usable": found.usable}
        say_json(facts | {"reason": found.reason})
    else:
        say(str(found.path), *([f"not used: {found.reason}"] if found.reason else []))
