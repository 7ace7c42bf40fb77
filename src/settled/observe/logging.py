"""Log lines for people, or as JSON for machines."""

from __future__ import annotations

import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType

import msgspec

from settled.signals import ConfigurationError

LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a settlement's fields are fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "settled", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """A line for people; the fields that its text does not name follow it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        fields = getattr(record, "settled", {})
        more = [
            f"{name}={value}"
            for name, value in fields.items()
            if f"{name}=" not in record.message and str(value) not in record.message
        ]
        return " ".join([super().formatMessage(record), *more])


def configure(level: str = "info", *, as_json: bool = False) -> None:
    """Send the log to standard error; as JSON, also everything that Python itself prints there."""
    if level not in LEVELS:
        raise ConfigurationError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if as_json else TextFormatter("%(asctime)s %(levelname)-8s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if as_json:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
        sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def tell(text: str, level: int = logging.INFO, **fields: object) -> None:
    """Write a command's own line to standard error, whatever the log level: plain, or JSON if the log is.

    >>> configure()
    >>> tell("orders[eu]:ship x 1")
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            record = logging.LogRecord("settled", level, "", 0, text.removeprefix("settled: "), None, None)
            record.settled = fields
            text = handler.formatter.format(record)
            break
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if issubclass(kind, (SystemExit, KeyboardInterrupt)):
        return
    found = error if error is not None else kind()
    logging.getLogger("settled").critical("%s: %s", kind.__name__, found, exc_info=(kind, found, trace))
