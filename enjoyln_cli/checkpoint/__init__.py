"""Where a model comes from, and what its directory holds."""
