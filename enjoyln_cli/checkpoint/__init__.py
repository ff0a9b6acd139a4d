"""Find a model on disk or on the Hub, and read its config and its weight files."""
