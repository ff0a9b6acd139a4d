"""A plan as YAML, and back."""
