"""Quantises a model in the form that suits the target best, and measures what was written."""
