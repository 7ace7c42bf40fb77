"""The `settled` command, and what it says where the command line is not installed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from settled._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

EXTRAS = {"run": "cli", "serve": "server", "bridge": "cli", "pipeline": "spark", "router": "router"}
"""What each command needs to be installed."""


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also while it is being imported."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"settled {__version__}\n")
        return
    try:
        from settled.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "watchfiles"):
            raise
        sys.exit("settled: the command line is an extra; install it with: pip install 'settled[cli]'")
    as_json = "--log-json" in sys.argv
    try:
        if as_json:
            sys.exit(_run_in_json(app))
        app(prog_name="settled")
    except ModuleNotFoundError as error:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if command not in EXTRAS or (error.name or "settled").partition(".")[0] == "settled":
            raise
        needs = f"{command} needs {error.name}"
        told = f"settled: {needs}; run: pip install 'settled[{EXTRAS[command]}]'"
        if not as_json:
            sys.exit(told)
        _tell(told)
        sys.exit(1)


def _run_in_json(app: Callable[..., int | None]) -> int | None:
    """Run a command whose log is JSON; what is wrong with its arguments is a line of JSON, too."""
    from settled.observe.logging import configure

    configure(as_json=True)
    try:
        return app(prog_name="settled", standalone_mode=False)
    except Exception as error:
        # Typer has a copy of click of its own in some versions; its errors have this method in all of them.
        if not hasattr(error, "format_message"):
            raise
        _tell(f"settled: {error.format_message()}")
        return 2


def _tell(text: str) -> None:
    import logging

    from settled.observe.logging import tell

    tell(text, logging.ERROR)


if __name__ == "__main__":
    main()
