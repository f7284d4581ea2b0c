"""Torch versions: tested ones, one too old, one too new, and what users then see."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from ipex_inductor import backend, compat
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


def test_an_untested_torch_gets_plain_inductor_and_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(compat, "untested_reason", lambda: "torch 2.99 is newer than tested")
    backend._warn_once.cache_clear()
    linear = torch.nn.Linear(4, 4).eval()
    fn = torch.compile(lambda x: torch.nn.functional.gelu(linear(x)), backend="ipex")
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for rows in (2, 3, 4):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fn(x), torch.nn.functional.gelu(linear(x)))
    assert caplog.text.count("2.99") == 1
    assert not counters["ipex"]


def test_an_unsupported_torch_is_a_clear_error(monkeypatch):
    original = compat.untested_reason
    monkeypatch.setattr(compat, "untested_reason", lambda: original("2.8.0"))
    with pytest.raises(Exception) as raised:  # noqa: PT011  Dynamo wraps it
        torch.compile(torch.sin, backend="ipex")(torch.randn(3))
    assert isinstance(raised.value.inner_exception, UnsupportedTorchError)


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
