"""Bundles and key pairs for the tests of the kernel cache."""

import re

from ipex_inductor.aot_cache import signing, trust
from ipex_inductor.aot_cache.bundling import packing
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key

META = {"shared": 49152}
SERIAL = 1_800_000_000


def filled(path, numbers=range(5)):
    """A folder with these kernels."""
    store = Store(path, bundles=())
    for number in numbers:
        assert store.put(key(number), META | {"n": number}, blob(number))
    return store.folder


def pair(folder, name="me", trusted=True):
    """The file of a new private key, whose public key is trusted."""
    private = folder / f"{name}.key"
    public = signing.new_pair(private, folder / f"{name}.pub")
    if trusted:
        trust.add(name, public)
    return private


def packed(path, signed_with=None, numbers=range(5), name="kernels", serial=SERIAL):
    """A bundle of these kernels."""
    folder = filled(path.with_name(f"entries of {path.name}"), numbers)
    packing.pack(folder, path, name, key=signed_with, serial=serial)
    return path


def literal(text):
    """For `match=`."""
    return re.escape(str(text))


# A file with a model and its inputs, for the verb.
MODEL = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), (torch.ones(2, 8),)
"""
