"""How a model in float32 is rounded and written in each format, and how the result is run."""
