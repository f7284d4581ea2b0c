"""Explain what a compilation decided, and capture its reports."""
