"""Compile graphs: from Dynamo's graph to a callable, in the order of docs/architecture.md."""
