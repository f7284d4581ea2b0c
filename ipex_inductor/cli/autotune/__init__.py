"""Verbs of `ipex-inductor autotune`."""
