"""Run two models on the same inputs and measure the distance between their outputs."""
