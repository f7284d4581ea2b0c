"""Rules, the ops that they match, and queries that every pass makes of a graph."""
