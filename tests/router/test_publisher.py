"""Publishing assignments: the switch, the allow-list, the retries, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import nats.errors
import nats.js.errors
import pytest

from settled.router import ExecAssignment, Outcome, PublishError, Router, RouterConfig
from settled.router.assignments import classify
from settled.router.simulate import new_assignment
from tests.nats.servers import Server, server


def on_router(one: Server, test: Callable[[Router], Awaitable[None]], **settings: object) -> None:
    """Run a test with a router that is open, and only publishes."""

    async def main() -> None:
        config = msgspec.convert({"url": one.url, **settings}, RouterConfig)
        router = Router(config, random=lambda: 0.5)
        await router.open()
        try:
            await asyncio.wait_for(test(router), 60)
        finally:
            await router.transport.close()

    asyncio.run(main())


async def stored(router: Router) -> list[ExecAssignment]:
    jetstream = router.transport.connection.jetstream
    count = (await jetstream.stream_info(router.config.assign_stream)).state.messages
    found = [await jetstream.get_msg(router.config.assign_stream, seq=n + 1) for n in range(count)]
    return [msgspec.json.decode(message.data or b"", type=ExecAssignment) for message in found]


def test_an_assignment_is_stored_once_with_its_headers() -> None:
    async def test(router: Router) -> None:
        assignment = new_assignment()
        assert await router.assignments.publish(assignment) is Outcome.PUBLISHED
        assert await router.assignments.publish(assignment) is Outcome.PUBLISHED
        assert await stored(router) == [assignment]
        message = await router.transport.connection.jetstream.get_msg(router.config.assign_stream, seq=1)
        assert (message.headers or {})["Nats-Msg-Id"] == str(assignment.assignment_id)
        assert (message.headers or {})["tenant_id"] == "tenant-1"

    with server() as one:
        on_router(one, test)


def test_the_kill_switch_and_the_allow_list_stop_publishing_and_are_counted() -> None:
    async def off(router: Router) -> None:
        assert await router.assignments.publish(new_assignment()) is Outcome.SKIPPED
        assert router.metrics.value("router_assignment_skipped_total", reason="disabled") == 1
        router.assignments.enabled = lambda: True
        assert await router.assignments.publish(new_assignment()) is Outcome.PUBLISHED
        assert len(await stored(router)) == 1

    async def only_one(router: Router) -> None:
        assert await router.assignments.publish(new_assignment("t1")) is Outcome.PUBLISHED
        assert await router.assignments.publish(new_assignment("t2")) is Outcome.BLOCKED
        assert router.metrics.value("router_assignment_blocked_total", tenant_id="t2") == 1
        assert [assignment.tenant_id for assignment in await stored(router)] == ["t1"]

    with server() as one:
        on_router(one, off, push_assignment_enabled=False)
    with server() as one:
        on_router(one, only_one, tenants=["t1"])


def test_a_server_that_stands_still_is_retried_with_doubling_delays_and_then_given_up_once() -> None:
    async def test(router: Router) -> None:
        delays: list[float] = []

        async def sleep(seconds: float) -> None:
            delays.append(seconds)

        router.assignments._sleep = sleep
        one.freeze()
        try:
            with pytest.raises(PublishError, match="retries exhausted after 3 retries: timeout") as found:
                await router.assignments.publish(new_assignment())
        finally:
            one.thaw()
        assert (found.value.kind, found.value.retries) == ("timeout", 3)
        assert delays == pytest.approx([0.1, 0.2, 0.4])
        value = router.metrics.value
        assert value("router_assignment_retry_total") == 3
        assert value("router_retry_exhausted_total", error_kind="timeout", retries="3") == 1
        assert value("router_assignment_publish_failures_total", subject=router.config.assign_subject) == 1
        assert value("router_assignment_published_total") == 0
        assert await router.assignments.publish(new_assignment()) is Outcome.PUBLISHED

    with server() as one:
        on_router(one, test, publish_timeout_seconds=0.3)


def test_a_server_that_comes_back_in_time_gets_the_assignment_once() -> None:
    async def test(router: Router) -> None:
        assignment = new_assignment()
        one.freeze()
        asyncio.get_running_loop().call_later(0.8, one.thaw)
        assert await router.assignments.publish(assignment) is Outcome.PUBLISHED
        assert router.metrics.value("router_assignment_retry_total") >= 1
        assert router.metrics.value("router_retry_exhausted_total") == 0
        await asyncio.sleep(0.3)
        assert await stored(router) == [assignment]

    with server() as one:
        on_router(one, test, publish_timeout_seconds=0.4, caf_max_retries=6)


def test_an_assignment_that_is_too_large_is_not_tried_again() -> None:
    async def test(router: Router) -> None:
        with pytest.raises(PublishError, match="payload_too_large"):
            await router.assignments.publish(new_assignment(text="x" * 2_000_000))
        assert router.metrics.value("router_assignment_retry_total") == 0
        assert router.metrics.value("router_retry_exhausted_total") == 0
        failures = "router_assignment_publish_failures_total"
        assert router.metrics.value(failures, error_kind="payload_too_large") == 1

    with server() as one:
        on_router(one, test)


@pytest.mark.parametrize(
    ("error", "kind", "retriable"),
    [
        (nats.errors.TimeoutError(), "timeout", True),
        (nats.js.errors.NoStreamResponseError(), "no_responders", True),
        (nats.errors.ConnectionClosedError(), "connection_failed", True),
        (ConnectionResetError(), "connection_failed", True),
        (nats.js.errors.ServiceUnavailableError(code=503), "server_error", True),
        (nats.js.errors.BadRequestError(code=400), "rejected_by_stream", False),
        (nats.errors.BadSubjectError(), "invalid_message", False),
        (nats.errors.AuthorizationError(), "unauthorized", False),
        (ValueError("?"), "unknown", False),
    ],
)
def test_errors_are_classified(error: Exception, kind: str, retriable: bool) -> None:
    fault = classify(error)
    assert (fault.kind, fault.retriable) == (kind, retriable)


def test_ids_are_exemplars_and_on_request_labels() -> None:
    from prometheus_client.openmetrics.exposition import generate_latest

    from settled.observe.metrics import Metrics

    known = {"assignment_id": "a-1", "request_id": "r-1"}
    for id_labels in (False, True):
        metrics = Metrics(id_labels=id_labels)
        metrics.count("router_jetstream_redelivery_total", known, reason="x", source="results")
        text = generate_latest(metrics.registry).decode()
        line = next(row for row in text.splitlines() if row.startswith("router_jetstream_redelivery_total{"))
        labels, _, exemplar = line.partition(" # ")
        assert ('assignment_id="a-1"' in labels) is id_labels
        assert ('request_id="r-1"' in exemplar) is not id_labels
