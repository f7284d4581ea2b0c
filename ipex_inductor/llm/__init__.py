"""Language models: checkpoints with quantized weights."""
