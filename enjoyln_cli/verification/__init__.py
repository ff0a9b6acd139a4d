"""Check whether a folded checkpoint is as close to the exact function as its original is."""
