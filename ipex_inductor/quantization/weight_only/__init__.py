"""Weight-only quantization: settings, rounding, GPTQ, and the linear layer on quantized weights."""
