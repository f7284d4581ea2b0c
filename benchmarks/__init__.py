"""Benchmarks: a few entries for whole models, kernels and start-up, and studies of one question."""
