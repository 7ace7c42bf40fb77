"""The `settled` command, and what it says where the command line is not installed."""

from __future__ import annotations

import sys

from settled._version import __version__

EXTRAS = {"run": "cli", "serve": "server", "bridge": "cli", "pipeline": "spark", "router": "router"}
"""What each command needs to be installed."""


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
    try:
        app(prog_name="settled")
    except ModuleNotFoundError as error:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if command not in EXTRAS or (error.name or "settled").partition(".")[0] == "settled":
            raise
        needs = f"{command} needs {error.name}"
        sys.exit(f"settled: {needs}; run: pip install 'settled[{EXTRAS[command]}]'")


if __name__ == "__main__":
    main()
