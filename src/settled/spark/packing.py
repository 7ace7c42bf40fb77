"""The handler's own modules as a file that Spark sends to its executors."""

from __future__ import annotations

import atexit
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from settled.queue.errors import Conflict
from settled.spark.source import SettledSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import SparkSession

LARGEST = 100_000_000
"""Bytes of files; what has more is for --py-files, or to be installed."""
_LEFT_OUT = {"__pycache__", "node_modules"}


def send(spark: SparkSession, module: str, files: Sequence[str] = ()) -> list[str]:
    """Give executors what the handler's module needs; returns the names of the modules that were sent.

    On one machine its processes find the same modules as this one, and nothing is sent. `files` are the
    user's own: .py, .zip, .egg or .whl.
    """
    context: Any = getattr(spark, "sparkContext", None)  # Spark Connect has none
    master = context.master if context is not None else ""
    local = master.startswith("local") and not master.startswith("local-cluster")
    parts = [] if local else own_parts(module)
    packed = [*parts, *(Path(file) for file in files if file.endswith(".py"))]
    sent = [file for file in files if not file.endswith(".py")]
    sent += [_archive(module, packed)] if packed else []
    for file in sent:
        if context is None:
            spark.addArtifacts(file, pyfile=True)
        else:
            context.addPyFile(file)
    if sent:
        spark.dataSource.register(SettledSource)  # a source has the files that were there when it was named
    return sorted(path.stem for path in parts)


def _archive(module: str, parts: list[Path]) -> str:
    folder = tempfile.mkdtemp(prefix="settled-handler-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # executors that come later ask for it too
    target = Path(folder) / f"{module.partition('.')[0]}-handler.zip"
    pack(parts, target)
    return str(target)


def own_parts(module: str) -> list[Path]:
    """The packages and modules beside a module, itself among them, that are imported by now.

    An installed module has none: executors have it installed too.
    """
    top = sys.modules[module.partition(".")[0]]
    place = _place(top)
    if place is None or _installed(place):
        return []
    found = {place}
    for other in list(sys.modules.values()):
        beside = _place(other) if "." not in getattr(other, "__name__", ".") else None
        if beside is not None and beside.parent == place.parent and not _installed(beside):
            found.add(beside)
    return sorted(found)


def _place(module: ModuleType) -> Path | None:
    """A top-level module's file, or a package's folder; None if it is built in or has no one place."""
    file = getattr(module, "__file__", None)
    if file is None:
        paths = list(getattr(module, "__path__", ()))
        return Path(paths[0]).resolve() if len(paths) == 1 else None
    path = Path(file).resolve()
    if path.suffix not in (".py", ".pyc"):
        return None
    return path.parent if hasattr(module, "__path__") else path


def _installed(path: Path) -> bool:
    homes = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    own = Path(__file__).resolve().parents[1]
    return path == own or any(home in path.parents for home in homes)


def pack(parts: Iterable[Path], target: Path) -> None:
    """Write packages and modules into one archive."""
    size = 0
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in parts:
            for file in _files(part):
                size += file.stat().st_size
                if size > LARGEST:
                    raise Conflict(
                        f"{part}: the handler's modules have more than {LARGEST:,} bytes; install them where "
                        "executors run, or give --py-files"
                    )
                archive.write(file, file.relative_to(part.parent))


def _files(part: Path) -> Iterator[Path]:
    if part.is_file():
        yield part
    elif part.is_dir():
        for child in sorted(part.iterdir()):
            if child.name not in _LEFT_OUT and not child.name.startswith("."):
                yield from _files(child)
