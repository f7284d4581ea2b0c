"""`ipex-inductor cache trust ls`: list the trusted keys."""

from ipex_inductor.aot_cache.trust import trust_folder, trusted_keys
from ipex_inductor.cli.shared import AsJson, say, say_json


def cache_trust_ls(as_json: AsJson = False) -> None:
    """List every key that is trusted here: its name, and its 32 bytes in hexadecimal."""
    keys = {name: public.hex() for name, public in trusted_keys().items()}
    if as_json:
        say_json({"path": str(trust_folder()), "keys": keys})
    else:
        say(*(f"{name} {public}" for name, public in keys.items()))
