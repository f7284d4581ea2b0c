"""Passes that restate ops on a GPU as other ops of torch, which give equal results sooner."""
