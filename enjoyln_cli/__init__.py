"""Turn LayerNorm checkpoints into RMSNorm checkpoints that compute the same function."""

__version__ = "0.1.0"
