"""Verbs of `ipex-inductor cache`."""
