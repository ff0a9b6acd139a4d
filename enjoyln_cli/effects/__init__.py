"""Side effects of a call of a model: what it can reach, what it changes, and what it keeps."""
