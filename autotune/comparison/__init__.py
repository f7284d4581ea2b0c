"""Compare pools of records, and show them."""
