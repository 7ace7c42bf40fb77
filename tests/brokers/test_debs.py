"""Servers from Debian packages: what happens where they are not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.brokers import debs


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without apt."""
    monkeypatch.setattr(debs, "CACHE", tmp_path / "brokers")
    monkeypatch.setenv("PATH", str(tmp_path))


def test_what_is_not_to_be_had_is_skipped_with_the_reason(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such: not installed, and there is no apt-get"):
        debs.required("no-such", "usr/bin/no-such")


def test_what_is_not_to_be_had_fails_under_ci(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such: not installed, and there is no apt-get"):
        debs.required("no-such", "usr/bin/no-such")


def test_what_the_machine_has_is_used_as_it_is(bare: None) -> None:
    assert debs.required("sh", "bin/sh") == Path("/")


def test_what_was_unpacked_completely_is_not_fetched_again(bare: None) -> None:
    unpacked = debs.CACHE / "no-such"
    unpacked.mkdir(parents=True)
    with pytest.raises(debs.NotThere):
        debs.root_of("no-such", "usr/bin/no-such")
    (unpacked / ".complete").touch()
    assert debs.root_of("no-such", "usr/bin/no-such") == unpacked


def test_what_stalls_is_asked_again(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    stalls_once = f"if [ -e {asked} ]; then echo there; else touch {asked}; exec sleep 60; fi"
    done = debs._run_again(["/bin/sh", "-c", stalls_once], 1.0)
    assert (done.returncode, done.stdout) == (0, "there\n")
