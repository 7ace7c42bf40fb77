"""What can be told of a job's arguments before Spark starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

from settled.policy import Policy
from settled.queue.errors import BadRequest
from settled.signals import ConfigurationError
from settled.spark.options import check_target, is_nats
from settled.transports.urls import masked

FORMATS = ("parquet", "delta")
LONGEST = 1_000_000
"""Hours: a report that goes back further is one without `hours`."""


def check_url(url: str, *, nats: bool) -> None:
    """Refuse an address that the job cannot read."""
    if not url.startswith(("postgresql://", "postgres://")) and not (nats and is_nats(url)):
        or_nats = ", or a NATS server, nats://…" if nats else ""
        hint = "must be the queue's database, postgresql://…, which `settled serve` prints"
        raise BadRequest("url", masked(url), f"{hint}{or_nats}")


def check_run(handler: Callable[..., Any], url: str, queue: str, group: str, to: str | None) -> None:
    """Refuse what is no handler for Spark, and results that would go round for ever."""
    from settled.spark.attempts import Job
    from settled.spark.shipping import names_of

    Job(handler, Policy(), names_of(handler), queue, group, in_order=False).subscription()
    if to is not None and _returns_none(handler):
        name = getattr(handler, "__name__", str(handler))
        hint = f"{name}() is declared to return None, so nothing would go there; let it return the result"
        raise BadRequest("to", to, hint)
    if to is not None and not is_nats(url):
        check_target(to, queue)


def _returns_none(handler: Callable[..., Any]) -> bool:
    """Whether a handler is annotated to return nothing."""
    returned = inspect.signature(inspect.unwrap(handler)).return_annotation
    return returned is None or returned == "None"


def check_format(kind: str) -> None:
    """Refuse a format that no export has."""
    if kind not in FORMATS:
        raise BadRequest("format", kind, f"must be {' or '.join(FORMATS)}")
    if kind == "delta":
        check_package("deltalake", "format delta", "delta")


def check_package(name: str, what: str, extra: str) -> None:
    """Refuse what needs a package that is not installed."""
    if util.find_spec(name) is None:
        raise ConfigurationError(f"{what} needs the package {name}: pip install 'settled[spark,{extra}]'")


def check_report(target: Path, hours: float | None) -> None:
    """Refuse a page that cannot be written, or a time that is none."""
    if target.suffix == ".json":
        raise BadRequest(
            "report", str(target), "must not end in .json: the figures go there, beside the page"
        )
    if not target.parent.is_dir():
        raise BadRequest("report", str(target), f"must be in a folder that is there, {target.parent} is not")
    if hours is not None and not 0 < hours <= LONGEST:
        raise BadRequest("hours", hours, f"must be above 0 and at most {LONGEST}")


def check_rate(rate: float | None) -> None:
    """Refuse a pace that is none."""
    if rate is not None and not 0 < rate < math.inf:
        raise BadRequest("rate", rate, "must be messages a second, above 0; leave it out for no limit")
