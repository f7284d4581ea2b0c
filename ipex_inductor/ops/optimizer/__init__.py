"""Updates of fused optimizer steps."""
