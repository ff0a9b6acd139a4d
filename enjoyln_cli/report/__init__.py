"""A plan as tables, text and pictures."""
