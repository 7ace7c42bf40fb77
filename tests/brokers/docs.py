"""The examples of a broker's page, executed with the address of a test's server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "brokers"


def example(page: str, url: str) -> dict[str, Any]:
    """The names that the page's Python block defines."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    code, replaced = re.subn(r'App\(".*?"\)', f"App({url!r})", code)
    assert replaced == 1
    names: dict[str, Any] = {"__name__": "block"}
    exec(compile(code, page, "exec"), names)
    return names
