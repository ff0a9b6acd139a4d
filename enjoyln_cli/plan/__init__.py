"""The plan: what has been proven about a model, as data."""
