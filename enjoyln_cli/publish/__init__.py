"""A converted checkpoint on the Hub, with its model card."""
