"""The verb `ipex-inductor doctor`."""
