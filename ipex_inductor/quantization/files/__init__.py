"""Files of quantization: configurations of IPEX and ours, tensors, kinds of inputs."""
