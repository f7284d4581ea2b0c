"""Optimizers, devices and fixtures for the tests of steps."""
