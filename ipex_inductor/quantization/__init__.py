"""INT8 quantization: capture, observe, convert to a graph of quantize and dequantize nodes."""
