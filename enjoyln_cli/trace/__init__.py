"""From a model and its calls to graphs."""
