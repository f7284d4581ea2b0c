"""Keys, bundles, servers and processes for the tests of the kernel cache."""
