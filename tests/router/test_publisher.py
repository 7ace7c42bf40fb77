"""Publishing assignments: the switch, the allow-list, the retries, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import nats.errors
import nats.js.errors
import pytest
from nats.js.api import DiscardPolicy
from prometheus_client import generate_latest

from settled.observe.metrics import OTHER, Metrics
from settled.router import ExecAssignment, Outcome, PublishError, Router, RouterConfig
from settled.router.assignments import classify
from settled.router.simulate import new_assignment
from tests.nats.conftest import until
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


def test_a_server_that_is_dead_is_a_failed_connection_not_a_timeout() -> None:
    """Defect R2: an operator looks for the server, not for a slow disk."""

    async def test(router: Router) -> None:
        one.stop(kill=True)
        await until(lambda: not router.transport.connection.status().connected)
        with pytest.raises(
            PublishError, match="retries exhausted after 2 retries: connection_failed"
        ) as found:
            await router.assignments.publish(new_assignment())
        assert found.value.kind == "connection_failed"
        value = router.metrics.value
        assert value("router_retry_exhausted_total", error_kind="connection_failed", retries="2") == 1
        assert value("router_assignment_publish_failures_total", error_kind="connection_failed") == 1
        assert value("router_assignment_publish_failures_total", error_kind="timeout") == 0

    with server() as one:
        on_router(one, test, publish_timeout_seconds=0.3, caf_max_retries=2)


def test_a_server_that_dies_while_it_is_asked_is_a_failed_connection() -> None:
    """Defect R2."""

    async def test(router: Router) -> None:
        one.freeze()  # the answer is not on its way yet
        asking = asyncio.create_task(router.assignments.publish(new_assignment()))
        await asyncio.sleep(0)
        one.stop(kill=True)
        with pytest.raises(PublishError) as found:
            await asking
        assert found.value.kind == "connection_failed"

    with server() as one:
        on_router(one, test, publish_timeout_seconds=0.5, caf_max_retries=0)


@pytest.mark.parametrize("limit", [{"max_msgs": 1}, {"max_bytes": 1_000}, {"max_msgs_per_subject": 1}])
def test_a_full_stream_rejects_an_assignment_and_is_not_asked_again(limit: dict[str, int]) -> None:
    """Defect R2."""

    async def test(router: Router) -> None:
        jetstream = router.transport.connection.jetstream
        found = (await jetstream.stream_info(router.config.assign_stream)).config
        each = "max_msgs_per_subject" in limit
        full = found.evolve(discard=DiscardPolicy.NEW, discard_new_per_subject=each, **limit)
        await jetstream.update_stream(full)
        await router.assignments.publish(new_assignment())
        with pytest.raises(PublishError, match="cannot be published after 0 retries: rejected_by_stream"):
            await router.assignments.publish(new_assignment(text="x" * 900))
        value = router.metrics.value
        assert value("router_assignment_retry_total") == 0
        assert value("router_assignment_publish_failures_total", error_kind="rejected_by_stream") == 1

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
        (
            nats.js.errors.ServiceUnavailableError(
                code=503, err_code=10077, description="write: no space left on device"
            ),
            "server_error",
            True,
        ),
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


@pytest.mark.parametrize("label", ["job_type", "provider_id"])
def test_labels_from_outside_have_a_bounded_number_of_values(label: str) -> None:
    """Defect R3: whoever sends results must not make a time series a message."""
    metrics = Metrics(label_values=10)
    for number in range(1_000):
        labels = {"status": "success", "job_type": "t", "provider_id": "p", label: f"v{number}"}
        metrics.count("router_results_total", **labels)
    assert metrics.value("router_results_total") == 1_000
    assert metrics.value("router_results_total", **{label: "v3"}) == 1
    assert metrics.value("router_results_total", **{label: OTHER}) == 990
    assert generate_latest(metrics.registry).count(b"router_results_total{") == 11


def test_a_label_value_from_outside_is_short() -> None:
    """Defect R3."""
    metrics = Metrics()
    metrics.count("router_assignment_blocked_total", tenant_id="x" * 100_000, reason="tenant_not_allowed")
    assert metrics.value("router_assignment_blocked_total", tenant_id=OTHER) == 1


def test_with_a_list_only_what_is_on_it_is_a_label_however_much_else_came_before() -> None:
    """Defect R3."""
    config = RouterConfig(metrics_providers=("acme",), metrics_job_types=("text",), metrics_label_values=2)
    metrics = Router(config).metrics
    for provider in (*(f"p{number}" for number in range(50)), "acme"):
        metrics.count("router_results_total", status="success", job_type="text", provider_id=provider)
    assert metrics.value("router_results_total", provider_id="acme") == 1
    assert metrics.value("router_results_total", provider_id=OTHER) == 50


def test_blocked_tenants_have_a_bounded_number_of_labels() -> None:
    """Defect R3."""
    metrics = Router(RouterConfig(tenants=("acme",), metrics_label_values=5)).metrics
    for number in range(100):
        metrics.count("router_assignment_blocked_total", tenant_id=f"t{number}", reason="tenant_not_allowed")
    assert metrics.value("router_assignment_blocked_total", tenant_id=OTHER) == 95
