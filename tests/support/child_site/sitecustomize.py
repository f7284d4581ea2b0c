"""What processes that tests start begin with: conftest.py has this folder in their path."""

import gc

# As in conftest.py: else all that torch imported is walked time and again.
gc.set_threshold(100_000, 10, 10)
