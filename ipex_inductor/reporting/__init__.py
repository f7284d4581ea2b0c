"""Record decisions, and print tables of them."""
