"""Choose whether a model is rotated before it is quantised, and measure what was written."""
