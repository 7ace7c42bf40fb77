"""The `settled` command, and what it says where the command line is not installed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from settled._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

EXTRAS = {"serve": "server", "pipeline": "spark", "router": "router"}
"""The extra that a command needs; of the others, `cli` is enough."""


def without_dsn(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without `--dsn`, and its value: one with a password is not for the process list.

    >>> without_dsn(["serve", "--dsn", "postgresql://ann:secret@host/shop", "--port", "0"])
    (['serve', '--port', '0'], 'postgresql://ann:secret@host/shop')
    """
    kept: list[str] = []
    dsn = None
    given = iter(arguments)
    for word in given:
        name, equals, value = word.partition("=")
        if name != "--dsn":
            kept.append(word)
        elif equals:
            dsn = value
        else:
            dsn = next(given, None)
    return kept, dsn


def _hide_dsn() -> None:
    """Start this process anew with the DSN in its environment, which other users cannot read."""
    kept, dsn = without_dsn(sys.argv[1:])
    if sys.argv[1:2] == ["serve"] and dsn and "@" in dsn:
        again = [sys.executable, "-m", "settled", *kept]
        os.execve(sys.executable, again, {**os.environ, "SETTLED_DSN": dsn})  # noqa: S606 - ourselves


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
    _hide_dsn()
    try:
        from settled.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "watchfiles"):
            raise
        sys.exit("settled: the command line is an extra; install it with: pip install 'settled[cli]'")
    as_json = "--log-json" in sys.argv or _is_on("SETTLED_LOG_JSON")
    try:
        if as_json:
            sys.exit(_run_in_json(app))
        app(prog_name="settled")
    except ModuleNotFoundError as error:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if not command or (error.name or "settled").partition(".")[0] == "settled":
            raise
        needs, extra = f"{command} needs {error.name}", EXTRAS.get(command, "cli")
        told = f"settled: {needs}; run: pip install 'settled[{extra}]'"
        if not as_json:
            sys.exit(told)
        _tell(told)
        sys.exit(1)


def _is_on(variable: str) -> bool:
    """Whether `run` or `serve` is told so by the environment, in a word that click takes for a yes."""
    said = os.environ.get(variable, "").strip().lower()
    return sys.argv[1:2] in (["run"], ["serve"]) and said in ("1", "on", "t", "true", "y", "yes")


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
