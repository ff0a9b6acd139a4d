"""``python -m enjoyln_cli`` is the ``enjoyln`` command."""

from enjoyln_cli.cli.main import run

if __name__ == "__main__":
    run()
