"""Real networks with real data, by which the accuracy of INT8 quantization is measured."""
