"""What a call of a model reaches, changes and leaves behind besides what it returns."""
