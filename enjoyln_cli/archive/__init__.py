"""Data stored beside a folded checkpoint from which the original is restored bit for bit."""
