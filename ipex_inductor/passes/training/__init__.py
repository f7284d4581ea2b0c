"""Rewrite graphs of training steps."""
