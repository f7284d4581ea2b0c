"""Imported by its old name, it is replaced; see ipex_inductor.old_names."""

from ipex_inductor.compat_ipex import take_place

take_place(__name__)
