"""Register custom ops, and name epilogues."""
