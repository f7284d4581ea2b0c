"""Capture of models as graphs, whose in-place operators become ordinary ones."""
