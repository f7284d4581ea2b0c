"""Torch versions: tested ones, one too old, one too new, and what users then see."""

import subprocess
import sys

import pytest

from ipex_inductor import compat
from ipex_inductor.errors import CompilerNotFoundError, UnsupportedTorchError


@pytest.mark.parametrize("minor", compat.TESTED)
def test_tested_minors_have_no_objection(minor):
    assert compat.untested_reason(f"{minor[0]}.{minor[1]}.0+cu130") is None


def test_this_torch_is_tested():
    assert compat.untested_reason() is None


def test_too_new_is_a_reason_and_too_old_an_error():
    assert "2.16" in compat.untested_reason("2.16.0.dev20261101")
    message = r"torch >= 2\.11; got torch 2\.8\.0.*pip install"
    with pytest.raises(UnsupportedTorchError, match=message):
        compat.untested_reason("2.8.0")


def test_option_types_are_known():
    types = compat.inductor_option_types()
    assert types["max_autotune"] is bool
    assert types["cpp.threads"] is int
    assert len(types) > 200


def test_a_missing_compiler_is_found_inside_wrapped_errors():
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        try:
            raise InvalidCxxCompiler
        except InvalidCxxCompiler as inner:
            raise RuntimeError("wrapped") from inner
    except RuntimeError as error:
        found = compat.compiler_missing(error)
    assert isinstance(found, CompilerNotFoundError)
    assert "apt-get install g++" in str(found)
    assert compat.compiler_missing(RuntimeError("other")) is None


NAMED = """
import sys, torch
from torch._inductor.codecache import CacheBase
from ipex_inductor import compat
hashed = []
def watch(event, args):
    if event == "open" and "libtriton" in str(args[0]):
        hashed.append(args[0])
compat.name_system()
sys.addaudithook(watch)
ours = CacheBase.get_system()
skipped = not hashed
CacheBase.get_system.cache_clear()
assert CacheBase.get_system() == ours, ours
print(skipped)
"""


def test_the_system_has_inductors_name():
    """Whether Triton is hashed for it or not; in a process of its own, which has named none."""
    done = subprocess.run([sys.executable, "-c", NAMED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(compat.torch_minor() in ((2, 13), (2, 14)))]


def test_workers_are_put_off_as_long_as_anybody_is_inside():
    from torch._inductor.async_compile import AsyncCompile

    usual = vars(AsyncCompile)["wakeup"]
    with compat.no_early_workers():
        with compat.no_early_workers():
            pass
        assert vars(AsyncCompile)["wakeup"] is not usual
        AsyncCompile.wakeup()
    assert vars(AsyncCompile)["wakeup"] is usual
