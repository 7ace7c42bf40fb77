"""The `settled` command, and what it says where the command line is not installed."""

from __future__ import annotations

import sys

from settled._version import __version__


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"settled {__version__}\n")
        return
    try:
        from settled.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "watchfiles"):
            raise
        sys.exit("settled: the command line is an extra; install it with: pip install 'settled[cli]'")
    app(prog_name="settled")


if __name__ == "__main__":
    main()
