"""Where a DataFrame's rows come from, as its column `batch` remembers it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from settled.queue.errors import Conflict
from settled.spark.options import is_nats

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MARK = "settled"
_known: dict[str, Origin] = {}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a DataFrame's rows come from; its column `batch` says so, but for the password."""

    url: str
    queue: str
    group: str
    holder: str
    ordering: str
    lease_seconds: float
    subject: str = ""

    @classmethod
    def of(cls, df: DataFrame) -> Origin:
        """The origin of a DataFrame's rows."""
        if "batch" in df.columns:
            found = df.schema["batch"].metadata.get(MARK)
            if found is not None:
                marked = cls(**json.loads(found))
                return _known.get(marked.holder) or replace(
                    marked, url=os.environ.get("SETTLED_URL", marked.url)
                )
        raise Conflict(
            "this DataFrame does not come from read_queue(), or lost its column `batch`: keep the columns "
            "lane, sequence and batch up to settle()"
        )

    def mark(self) -> dict[str, str]:
        """Metadata for the column `batch`; it may end up in files, so the password stays here."""
        _known[self.holder] = self
        shown = {name: getattr(self, name) for name in Origin.__slots__}
        open_ = re.sub(r"//[^/@]*@", "//", self.url) if is_nats(self.url) else self.url
        return {MARK: json.dumps({**shown, "url": re.sub(r"(//[^:/@]*):[^@]*@", r"\1@", open_)})}

    @property
    def in_order(self) -> bool:
        """Whether a failed row holds back its lane."""
        return self.ordering == "in_order"

    def options(self) -> dict[str, str]:
        """As options of the format."""
        options = {
            "url": self.url,
            "queue": self.queue,
            "group": self.group,
            "holder": self.holder,
            "ordering": self.ordering,
            "leaseSeconds": str(round(self.lease_seconds)),
        }
        return options | ({"subject": self.subject} if self.subject else {})
