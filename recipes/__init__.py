"""The recipes that come with enjoyln, one for each family: data only."""
