"""Fixtures of the tests of the verbs about language models."""

import pytest

from ipex_inductor.llm import steps


@pytest.fixture
def traced_only(monkeypatch):
    """Run graphs as Dynamo traced them, without compiling them."""
    monkeypatch.setattr(steps, "BACKEND", "eager")
