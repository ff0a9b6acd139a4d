"""How fast a folded model is compared with its original, on this machine."""
