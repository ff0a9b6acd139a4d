"""What is proven of a model, as data."""
