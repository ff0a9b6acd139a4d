"""The calls of a model that a proof has to cover, and example inputs for them."""
