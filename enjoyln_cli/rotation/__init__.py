"""Which features can be turned, and which norms can be merged into the layers after them."""
