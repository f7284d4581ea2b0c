"""Custom ops of attention."""
