"""Custom pointwise ops and reductions."""
