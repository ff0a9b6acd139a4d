"""Which values can be held at another scale, a power of two, so that float16 does not overflow."""
