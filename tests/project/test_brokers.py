"""The table of brokers in the docs says what the transports declare."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from settled.transports import KINDS, Kind
from settled.transports.base import Capabilities
from settled.transports.table import renewed, table

PAGE = Path(__file__).parents[2] / "docs" / "brokers.md"


def test_the_table_of_brokers_is_up_to_date() -> None:
    assert renewed(PAGE) == PAGE.read_text(), "run: python -m settled.transports.table docs/brokers.md"


@pytest.mark.parametrize("kind", sorted(set(KINDS.values()), key=lambda kind: kind.name))
def test_a_transport_declares_what_it_can_do_before_it_is_opened(kind: Kind) -> None:
    declared = getattr(import_module(kind.module), kind.name).capabilities
    assert isinstance(declared, Capabilities)


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- capabilities -->\nold\n<!-- /capabilities -->\nrest\n")
    assert renewed(page) == f"<!-- capabilities -->\n{table(tmp_path)}\n<!-- /capabilities -->\nrest\n"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="to write the table into"):
        renewed(page)
