"""Lower convolutions."""
