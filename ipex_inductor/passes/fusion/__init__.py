"""Fuse GEMMs and convolutions with what is computed before and behind them."""
