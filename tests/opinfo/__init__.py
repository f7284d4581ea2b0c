"""Torch's own case lists (OpInfo, ModuleInfo) with backend ipex, held to eager: `make opinfo`."""
