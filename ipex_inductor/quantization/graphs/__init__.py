"""Graph modules with quantized values, and in-place operators in their graphs."""
