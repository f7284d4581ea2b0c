"""The verb `ipex-inductor demo`."""
