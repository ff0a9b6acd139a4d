"""How a captured graph is read, and where operations can be put into it."""
