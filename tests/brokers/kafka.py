"""A Kafka cluster for tests: librdkafka's own mock brokers, on TCP, in a process that is told what to do.

No real broker can be installed from the package registries. The mock speaks the protocol, keeps topics,
groups, committed offsets with their metadata and share groups, and fails on request; it stores nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PRODUCE = 0
OFFSET_COMMIT = 8
TOPIC_AUTHORIZATION_FAILED = 29
GROUP_AUTHORIZATION_FAILED = 30
LOCK_SECONDS = 2.0
_PRODUCER = 0


class Cluster:
    """The mock cluster's process, seen from the test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.brokers.kafka"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, "the mock cluster ended"
        assert not answer.startswith("error"), answer
        return answer

    def tell(self, *words: object) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def create(self, topic: str, partitions: int = 1) -> None:
        self.tell("create", topic, partitions)

    def down(self) -> None:
        """Close every connection and take no more."""
        self.tell("down")

    def up(self) -> None:
        self.tell("up")

    def fail(self, request: int, error: int, times: int) -> None:
        """Answer the next requests of this kind with an error."""
        self.tell("fail", request, error, times)

    def works(self, request: int) -> None:
        """Answer them as usual again."""
        self.tell("works", request)

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    one = Cluster()
    try:
        yield one
    finally:
        one.stop()


def _library() -> Any:
    import confluent_kafka

    (path,) = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs").glob("librdkafka*.so*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return library


def main() -> None:
    library = _library()
    problem = ctypes.create_string_buffer(512)
    handle = library.rd_kafka_new(_PRODUCER, library.rd_kafka_conf_new(), problem, len(problem))
    assert handle, problem.value
    mock = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(handle, 1))
    library.rd_kafka_mock_set_controller_id(mock, 1)
    # With no delay at all, two that join a classic group at the same moment can lock the mock up.
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(mock, 200)
    library.rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(mock, 100)
    library.rd_kafka_mock_set_group_consumer_session_timeout_ms(mock, 1000)
    library.rd_kafka_mock_sharegroup_set_auto_offset_reset(mock, 1)
    library.rd_kafka_mock_sharegroup_set_record_lock_duration(mock, int(LOCK_SECONDS * 1000))
    print(library.rd_kafka_mock_cluster_bootstraps(mock).decode(), flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        code = 0
        match word:
            case "create":
                code = library.rd_kafka_mock_topic_create(mock, rest[0].encode(), int(rest[1]), 1)
            case "down":
                code = library.rd_kafka_mock_broker_set_down(mock, 1)
            case "up":
                code = library.rd_kafka_mock_broker_set_up(mock, 1)
            case "fail":
                request, error, times = map(int, rest)
                errors = (ctypes.c_int * times)(*[error] * times)
                library.rd_kafka_mock_push_request_errors_array(
                    mock, ctypes.c_int16(request), ctypes.c_size_t(times), errors
                )
            case "works":
                library.rd_kafka_mock_clear_request_errors(mock, ctypes.c_int16(int(rest[0])))
        print("ok" if code == 0 else f"error {code}", flush=True)


if __name__ == "__main__":
    main()
