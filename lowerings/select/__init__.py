"""Choose a kernel: records, models and libraries."""
