"""How each tensor of a plan changes: lists of steps, with one class for each kind of step."""
