"""Preprocess weights once, and notice when one changes."""
