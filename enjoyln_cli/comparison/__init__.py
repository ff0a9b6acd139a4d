"""Runs two models on the same inputs and says how far their outputs are apart."""
