"""Torch versions: tested ones, one too old, one too new, and what users then see."""

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
