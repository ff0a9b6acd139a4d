"""From captured graphs to who may be centred."""
