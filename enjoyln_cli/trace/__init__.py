"""Capture graphs of a model's calls."""
