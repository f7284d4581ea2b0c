"""Lower fused optimizer steps."""
