"""Model classes of transformers: build them without weights, load them, run and examine them."""
