"""Fixtures of the tests of language models."""

import pytest

from ipex_inductor.llm import steps


@pytest.fixture
def traced_only(monkeypatch):
    """Run graphs as Dynamo traced them: what is compiled is counted, in seconds."""
    monkeypatch.setattr(steps, "BACKEND", "eager")
