"""From a model to its plan: which norms fold, by which edits, and why the others stay."""
