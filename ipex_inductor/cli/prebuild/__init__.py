"""The verb `ipex-inductor prebuild`."""
