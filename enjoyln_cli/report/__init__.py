"""Show a plan as tables, text and pictures."""
