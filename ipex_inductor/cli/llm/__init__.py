"""Verbs of `ipex-inductor llm`."""
