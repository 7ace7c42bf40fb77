"""Log lines for people, or as JSON for machines."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

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
    """Send the log to standard error."""
    if level not in LEVELS:
        raise ConfigurationError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if as_json else TextFormatter("%(asctime)s %(levelname)-8s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
