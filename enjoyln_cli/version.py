"""The version of enjoyln, and the versions that results record."""

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def versions(*packages: str) -> dict[str, str]:
    """The versions of enjoyln and of installed ``packages``, by name."""
    found = {"enjoyln": __version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
