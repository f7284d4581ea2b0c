"""Settings under which Inductor compiles a package."""

import shutil

import pytest
from torch._inductor import compile_fx, config

from ipex_inductor import compat

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("path", ["/usr/bin/openssl", None])
def test_headers_are_precompiled_only_where_torch_can_hash_them(monkeypatch, path):
    """Torch runs `openssl` for that, and raises FileNotFoundError without it."""
    settings = []

    def compile_nothing(*_, **__):
        settings.append(config.aot_inductor.precompile_headers)
        return "library.so"

    monkeypatch.setattr(shutil, "which", lambda name: path)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_nothing)
    compat.compile_ahead(None, (), "", True)
    usual = config.aot_inductor.precompile_headers
    assert settings == [usual if path else False]
