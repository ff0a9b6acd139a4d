"""Recipes: plans written as YAML, read again, and checked against a proven plan."""
