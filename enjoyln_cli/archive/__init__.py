"""What is kept of an original beside its folded form, so that it can be restored bit for bit."""
