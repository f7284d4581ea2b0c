"""Read what other tuners measured."""
