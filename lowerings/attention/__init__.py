"""Lower attention."""
