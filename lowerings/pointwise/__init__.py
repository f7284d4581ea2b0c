"""Lower pointwise ops and reductions."""
