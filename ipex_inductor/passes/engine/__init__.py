"""Rules, the ops that they match, and what every pass asks of a graph."""
