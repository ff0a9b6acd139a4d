"""Which features can be rotated, and which norms can be fused into the layers after them."""
