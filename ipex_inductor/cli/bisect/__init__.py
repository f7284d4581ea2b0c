"""The verb `ipex-inductor bisect`."""
