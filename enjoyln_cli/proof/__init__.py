"""Prove, on captured graphs, which weights can be centred and which norms can be converted."""
