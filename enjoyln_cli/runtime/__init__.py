"""A live model that computes RMSNorm, and what keeps it right."""
