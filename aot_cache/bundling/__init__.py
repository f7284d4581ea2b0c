"""Pack and merge kernel caches."""
