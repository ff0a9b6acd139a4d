"""``python -m enjoyln_cli`` is the ``enjoyln`` command."""

from enjoyln_cli.cli.main import main

if __name__ == "__main__":
    main(prog_name="enjoyln")
