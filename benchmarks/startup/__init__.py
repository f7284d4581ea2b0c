"""Time until a compiled model's first output."""
