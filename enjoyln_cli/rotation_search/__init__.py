"""Which orthogonal matrices a rotation uses, decided on the user's data."""
