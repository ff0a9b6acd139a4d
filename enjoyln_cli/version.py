"""The version of enjoyln: what results record, and what the package is built as."""

__version__ = "0.1.0"
