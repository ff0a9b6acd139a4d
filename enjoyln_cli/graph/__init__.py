"""Helpers to read captured graphs, and to find where operations can be inserted."""
