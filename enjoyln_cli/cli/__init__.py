"""The ``enjoyln`` command."""
