"""Model classes of transformers, without weights or with."""
