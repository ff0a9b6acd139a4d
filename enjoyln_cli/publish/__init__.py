"""Upload a converted checkpoint to the Hub, with a model card."""
