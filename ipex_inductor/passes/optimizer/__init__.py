"""Match the steps of optimizers."""
