"""Attention over caches with layouts of IPEX: in pages, and shared by beams."""
