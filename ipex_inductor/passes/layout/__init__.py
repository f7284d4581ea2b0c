"""Choose memory layouts, and fold batch norms."""
