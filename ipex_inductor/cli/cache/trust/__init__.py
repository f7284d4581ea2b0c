"""Verbs of `ipex-inductor cache trust`."""
