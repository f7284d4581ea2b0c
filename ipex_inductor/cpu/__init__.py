"""What users of IPEX know under `ipex.cpu`."""
