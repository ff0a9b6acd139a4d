"""How fast a folded model is beside its original, on this machine."""
