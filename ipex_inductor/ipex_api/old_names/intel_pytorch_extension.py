"""Replace the module imported by this old name; see ipex_inductor.ipex_api.old_names."""

from ipex_inductor.ipex_api.compat_ipex import take_place

take_place(__name__)
