"""Studies: each answers one question about a kernel, a rule or a cache."""
