"""The router where everything goes wrong: nothing lost, nothing counted twice, and it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import nats
from settled.router import Outcome, PublishError
from settled.router.simulate import new_assignment
from tests.nats.conftest import until
from tests.nats.servers import Server
from tests.router.conftest import Proxy, Seen, config, dead_letters, is_settled, router_on, worker_on


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield


def run(test: Awaitable[None], seconds: float = 60) -> None:
    async def main() -> None:
        await asyncio.wait_for(test, seconds)

    asyncio.run(main())


def result_for(assignment: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "version": "1",
        "assignment_id": str(assignment.assignment_id if assignment is not None else uuid4()),
        "status": "success",
        "provider_id": "p1",
        "job": {"type": "text.generate"},
        "timestamp": 1_700_000_000_000,
        "tenant_id": "tenant-1",
        **changes,
    }


def test_an_assignment_comes_back_as_an_ack_and_a_result_in_one_trace(one: Server) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    async def test() -> None:
        settings, seen = config(one.url), Seen()
        async with router_on(settings, on_result=seen) as router, worker_on(settings):
            assignment = new_assignment()
            assert await router.assignments.publish(assignment) is Outcome.PUBLISHED
            await until(lambda: seen.assignments == [str(assignment.assignment_id)])
            value = router.metrics.value
            await until(lambda: value("router_results_total") == 1 and value("router_acks_total") == 1)
            assert value("router_results_total", status="success", job_type="text.generate") == 1
            assert value("router_acks_total", status="accepted") == 1
            assert value("router_assignment_published_total") == 1
            await until(lambda: is_settled(router))
            assert len(router.results.deliveries) == len(router.acks.deliveries) == 0
        spans = {span.name: span for span in exporter.get_finished_spans()}
        names = {
            "router.assignment.publish",
            "worker.execute",
            "router.acks.process",
            "router.results.process",
        }
        assert names <= set(spans)
        assert len({spans[name].context.trace_id for name in names}) == 1
        parent = spans["worker.execute"].parent
        assert parent is not None
        assert parent.span_id == spans["router.assignment.publish"].context.span_id

    run(test())


def test_a_worker_that_is_down_finds_its_assignments_when_it_is_back(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url), Seen()
        async with router_on(settings, on_result=seen) as router:
            sent = [new_assignment() for _ in range(20)]
            for assignment in sent:
                await router.assignments.publish(assignment)
            assert seen.calls == 0
            async with worker_on(settings):
                await until(lambda: len(seen.results) == 20)
            assert seen.assignments == sorted(str(assignment.assignment_id) for assignment in sent)

    run(test())


def test_slow_late_and_crashing_workers_lose_nothing(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url), Seen()
        misdeeds = {"slow": 0.3, "slow_seconds": 0.5, "late": 0.3, "late_seconds": 0.7, "crash": 0.2}
        async with router_on(settings, on_result=seen) as router, worker_on(settings, **misdeeds) as worker:
            sent = [new_assignment() for _ in range(40)]
            for assignment in sent:
                await router.assignments.publish(assignment)
            everyone = sorted(str(assignment.assignment_id) for assignment in sent)
            await until(lambda: sorted(set(seen.assignments)) == everyone, 40)
            assert worker.done["crash"] > 0
            assert seen.assignments == everyone
            assert await dead_letters(router) == []

    run(test())


def test_publishing_outlives_a_server_restart_and_gives_up_when_there_is_none(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url, publish_timeout_seconds=0.4, caf_max_retries=2), Seen()
        async with router_on(settings, on_result=seen) as router, worker_on(settings):
            await router.assignments.publish(new_assignment())
            await until(lambda: len(seen.results) == 1)
            await asyncio.to_thread(one.stop)
            with pytest.raises(PublishError) as found:
                await router.assignments.publish(new_assignment())
            assert found.value.retries == 2
            assert router.metrics.value("router_retry_exhausted_total") == 1
            assert router.metrics.value("router_assignment_retry_total") == 2
            assert not router.app.status().healthy
            await asyncio.to_thread(one.start)
            await until(lambda: router.app.status().healthy, 30)
            await router.assignments.publish(new_assignment())
            await until(lambda: len(set(seen.assignments)) >= 2, 30)
            assert router.metrics.value("router_retry_exhausted_total") == 1

    run(test())


def test_a_server_restart_in_the_middle_of_the_traffic_loses_nothing(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url, publish_timeout_seconds=1, caf_max_retries=20), Seen()
        async with router_on(settings, on_result=seen) as router, worker_on(settings):
            sent = [new_assignment() for _ in range(60)]
            for number, assignment in enumerate(sent):
                if number == 30:
                    restart = asyncio.create_task(asyncio.to_thread(_restart, one))
                await router.assignments.publish(assignment, expected_latency_ms=60_000)
            await restart
            everyone = sorted(str(assignment.assignment_id) for assignment in sent)
            await until(lambda: sorted(set(seen.assignments)) == everyone, 40)
            await until(lambda: is_settled(router), 20)
            assert await dead_letters(router) == []
            # What was handled twice, if anything, was handled before the restart could be told of it.
            assert router.metrics.value("router_jetstream_maxdeliver_exhausted_total") == 0

    run(test(), 90)


def _restart(one: Server) -> None:
    one.stop(kill=True)
    one.start()


def test_a_connection_cut_in_the_middle_of_an_ack_has_the_result_handled_once(one: Server) -> None:
    async def test() -> None:
        async with Proxy(one.port) as proxy:
            settings, seen = config(proxy.url), Seen()
            client = await nats.connect(one.url)
            async with router_on(settings, on_result=seen) as router:
                # The ack is on its way, and lost with the connection.
                proxy.cut_at = f"PUB $JS.ACK.{settings.result_stream}".encode()
                await client.jetstream().publish(
                    settings.result_subject, msgspec.json.encode(result_for(msg_id="r-1"))
                )
                value = router.metrics.value
                await until(lambda: value("router_results_duplicate_total") == 1, 30)
                await until(lambda: is_settled(router), 30)
                assert proxy.cuts == 1
                assert seen.calls == 1
                assert value("router_results_total") == 1
                assert await dead_letters(router) == []
            await client.close()

    run(test())


def test_a_storm_of_duplicates_is_handled_once_and_counted(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url), Seen()
        async with router_on(settings, on_result=seen) as router:
            connection = router.transport.connection
            body = msgspec.json.encode(result_for(msg_id="the-same"))
            await asyncio.gather(
                *(connection.publish_once(settings.result_subject, body, {}, 5) for _ in range(200))
            )
            await until(lambda: router.metrics.value("router_results_duplicate_total") == 199)
            await until(lambda: is_settled(router))
            assert seen.calls == 1
            assert router.metrics.value("router_results_total") == 1

    run(test())


def test_a_wrong_tenant_is_audited_tried_again_and_given_up_once(
    one: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        settings, seen = config(one.url, tenants=["tenant-1", "tenant-2"]), Seen()
        async with router_on(settings, on_result=seen) as router:
            assignment = new_assignment("tenant-1")
            await router.assignments.publish(assignment)
            connection = router.transport.connection
            for tenant in ("tenant-2", "tenant-9"):
                body = msgspec.json.encode(result_for(assignment, tenant_id=tenant, msg_id=tenant))
                await connection.publish_once(settings.result_subject, body, {}, 5)
            value = router.metrics.value
            exhausted = "router_jetstream_maxdeliver_exhausted_total"
            await until(lambda: value(exhausted) == 2, 30)
            await asyncio.sleep(0.5)
            assert value(exhausted, reason="tenant_mismatch") == 1
            assert value(exhausted, reason="tenant_not_allowed") == 1
            assert value("router_results_tenant_rejected_total", reason="tenant_mismatch") == 3
            assert value("router_jetstream_redelivery_total", reason="tenant_mismatch") == 2
            assert value("router_dlq_total", reason="max_deliver_exhausted") == 2
            assert seen.calls == 0
            letters = await dead_letters(router)
            assert [(letter.headers or {})["settled-attempts"] for letter in letters] == ["3", "3"]
            await until(lambda: is_settled(router))
            assert len(router.results.deliveries) == 0

    run(test())
    audited = [record for record in caplog.records if record.name == "settled.router.audit"]
    assert len(audited) == 6
    asked = [record for record in caplog.records if record.message == "Message redelivery requested"]
    assert len(asked) == 4
    assert all(record.levelno == logging.INFO and record.settled["assignment_id"] for record in asked)


def test_poison_is_dead_lettered_at_once_and_counted_by_field(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url), Seen()
        async with router_on(settings, on_result=seen) as router:
            connection = router.transport.connection
            poison = [b"\x00\xff", b"{", *(msgspec.json.encode(result_for(status=s)) for s in ("?", "!"))]
            for body in poison:
                await connection.publish_once(settings.result_subject, body, {}, 5)
            await connection.publish_once(settings.ack_subject, b'{"version": "1"}', {}, 5)
            await connection.publish_once(settings.result_subject, msgspec.json.encode(result_for()), {}, 5)
            await until(lambda: seen.calls == 1)
            value = router.metrics.value
            await until(lambda: value("router_dlq_total", reason="contract_violation") == 5)
            assert value("router_results_parse_failed_total") == 2
            assert value("router_results_validation_failed_total", field="status") == 2
            assert value("router_acks_validation_failed_total", field="assignment_id") == 1
            assert value("router_jetstream_redelivery_total") == 0
            letters = await dead_letters(router)
            assert sorted(letter.data or b"" for letter in letters) == sorted([*poison, b'{"version": "1"}'])

    run(test())


def test_a_handler_that_fails_for_a_while_gets_its_result_again(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url), Seen(failing=2)
        async with router_on(settings, on_result=seen) as router:
            body = msgspec.json.encode(result_for())
            await router.transport.connection.publish_once(settings.result_subject, body, {}, 5)
            await until(lambda: len(seen.results) == 1)
            value = router.metrics.value
            assert value("router_jetstream_redelivery_total", reason="processing_error") == 2
            await until(lambda: is_settled(router))
            assert value("router_jetstream_maxdeliver_exhausted_total") == 0

    run(test())


def test_work_that_takes_longer_than_the_broker_waits_is_done_once(one: Server) -> None:
    async def test() -> None:
        settings, calls = config(one.url), []

        async def slow(result: object) -> None:
            calls.append(result)
            await asyncio.sleep(1.2)

        async with router_on(settings, on_result=slow) as router:
            for number in range(2):
                body = msgspec.json.encode(result_for(msg_id=str(number)))
                await router.transport.connection.publish_once(settings.result_subject, body, {}, 5)
            await until(lambda: router.metrics.value("router_results_total") == 2)
            await until(lambda: is_settled(router))
            assert len(calls) == 2
            assert router.metrics.value("router_results_duplicate_total") == 0

    run(test())


def test_routers_share_the_work_and_count_an_exhaustion_once_between_them(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url), [Seen(failing=1000), Seen(failing=1000)]
        async with (
            router_on(settings, on_result=seen[0]) as first,
            router_on(settings, on_result=seen[1]) as second,
        ):
            for number in range(40):
                body = msgspec.json.encode(result_for(msg_id=str(number)))
                await first.transport.connection.publish_once(settings.result_subject, body, {}, 5)

            def total(name: str) -> float:
                return first.metrics.value(name) + second.metrics.value(name)

            await until(lambda: total("router_jetstream_maxdeliver_exhausted_total") == 40, 40)
            await asyncio.sleep(0.5)
            assert total("router_jetstream_maxdeliver_exhausted_total") == 40
            assert total("router_jetstream_redelivery_total") == 80
            assert total("router_dlq_total") == 40
            assert len(await dead_letters(first)) == 40
            assert min(one.calls for one in seen) > 20
            assert sum(one.calls for one in seen) == 120

    run(test())


def test_a_result_that_died_with_its_router_is_counted_once_by_the_next(one: Server) -> None:
    async def test() -> None:
        settings = config(one.url)
        async with router_on(settings):
            pass
        client = await nats.connect(one.url)
        taken: list[str] = []

        async def swallow(message: Any) -> None:
            taken.append(message.reply)

        # A router that takes its messages and is never heard of again.
        await client.subscribe("_router.router-results", queue="router-results", cb=swallow)
        await client.jetstream().publish(settings.result_subject, msgspec.json.encode(result_for()))
        await until(lambda: len(taken) == 3)
        await client.close()
        async with router_on(settings) as router:
            value = router.metrics.value
            exhausted = "router_jetstream_maxdeliver_exhausted_total"
            await until(lambda: value(exhausted, reason="not_settled_in_time") == 1, 30)
            await asyncio.sleep(0.5)
            assert value(exhausted) == value("router_dlq_total") == 1
            assert len(await dead_letters(router)) == 1

    run(test())


def test_the_simulated_worker_does_each_misdeed(one: Server) -> None:
    async def test() -> None:
        settings, seen = config(one.url), Seen()
        misdeeds = {"duplicate": 0.5, "poison": 0.3, "impostor": 0.3, "reject": 0.3, "fail": 0.5}
        async with router_on(settings, on_result=seen) as router, worker_on(settings, **misdeeds) as worker:
            for _ in range(60):
                await router.assignments.publish(new_assignment())
            # At least: on a busy machine a message may come again before it is settled, and counts again.
            value = router.metrics.value
            await until(lambda: value("router_acks_total") >= 60)
            rejected = worker.done["reject"]
            await until(lambda: len(seen.results) == 60 - rejected)
            await until(lambda: value("router_results_duplicate_total") >= worker.done["duplicate"])
            exhausted = "router_jetstream_maxdeliver_exhausted_total"
            await until(lambda: value(exhausted) >= worker.done["impostor"], 30)
            assert value("router_results_validation_failed_total", field="status") >= worker.done["poison"]
            assert value("router_acks_total", status="rejected") >= rejected
            assert value("router_results_total", status="error") >= worker.done["fail"]
            assert min(worker.done[name] for name in misdeeds) > 0

    run(test())
