"""CloudEvents, also against the reference library."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from cloudevents.v1.conversion import to_binary, to_json, to_structured
from cloudevents.v1.http import CloudEvent as Reference
from cloudevents.v1.http import from_http

from settled import App, CloudEvent, Invalid, Message, cloudevents, codec
from settled.testing import Rehearsal

ATTRIBUTES: dict[str, Any] = {
    "id": "A-1",
    "source": "/shop/münchen",
    "type": "order.placed",
    "subject": 'with "quotes", % and spaces',
    "time": "2026-01-02T03:04:05.678000Z",
    "tenant": "acme",
}


def ours() -> CloudEvent:
    return CloudEvent(
        id="A-1",
        source="/shop/münchen",
        type="order.placed",
        subject=ATTRIBUTES["subject"],
        time=datetime(2026, 1, 2, 3, 4, 5, 678000, UTC),
        extensions={"tenant": "acme"},
    )


def test_binary_mode_is_read_as_the_reference_library_writes_it() -> None:
    headers, _ = to_binary(Reference(ATTRIBUTES, {"id": 1}))
    from_reference = {name: value for name, value in headers.items() if name.startswith("ce-")}
    event = cloudevents.from_headers(from_reference, "application/json")
    assert event is not None
    assert (event.id, event.type, event["tenant"]) == ("A-1", "order.placed", "acme")
    assert event.time == datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)
    assert event.datacontenttype == "application/json"


def test_binary_mode_written_here_is_read_by_the_reference_library() -> None:
    event = CloudEvent(id="A-1", source="/shop", type="order.placed", extensions={"tenant": "acme"})
    headers = {**cloudevents.to_headers(event), "content-type": "application/json"}
    read = from_http(headers, b'{"id": 1}')
    assert (read["id"], read["type"], read["tenant"], read.data) == ("A-1", "order.placed", "acme", {"id": 1})


def test_binary_headers_are_ascii_and_come_back_whole() -> None:
    headers = cloudevents.to_headers(ours())
    assert all(value.isascii() and " " not in value for value in headers.values())
    event = cloudevents.from_headers(headers)
    assert event == ours()


def test_structured_mode_is_read_as_the_reference_library_writes_it() -> None:
    for document in (
        to_structured(Reference(ATTRIBUTES, {"id": 1}))[1],
        to_json(Reference(ATTRIBUTES, {"id": 1})),
    ):
        event, data, content_type = cloudevents.unwrap(document)
        assert event.subject == ATTRIBUTES["subject"]
        assert event["tenant"] == "acme"
        assert json.loads(data) == {"id": 1}
        assert content_type == "application/json"


def test_structured_mode_written_here_is_read_by_the_reference_library() -> None:
    document = cloudevents.wrap(ours(), b'{"id":1}', "application/json")
    read = from_http({"content-type": cloudevents.STRUCTURED}, document)
    assert (read["subject"], read["tenant"], read.data) == (ATTRIBUTES["subject"], "acme", {"id": 1})


def test_an_event_inside_an_event_is_the_payload_and_stays_so() -> None:
    decode, headers = codec.decoder(dict), {"content-type": cloudevents.STRUCTURED}
    inner = cloudevents.wrap(ours(), b'{"id":1}', "application/json")
    outer = cloudevents.wrap(ours(), inner, cloudevents.STRUCTURED)
    for _ in range(2):
        assert decode(outer, headers) == json.loads(inner)
        assert decode(inner, headers) == {"id": 1}


def test_bytes_travel_as_base64() -> None:
    document = cloudevents.wrap(ours(), b"\x00\xff", "application/octet-stream")
    assert json.loads(document)["data_base64"] == base64.b64encode(b"\x00\xff").decode()
    assert cloudevents.unwrap(document)[1:] == (b"\x00\xff", "application/octet-stream")


def test_text_data_is_the_text() -> None:
    document = {**ATTRIBUTES, "specversion": "1.0", "datacontenttype": "text/plain", "data": "hello"}
    assert cloudevents.unwrap(msgspec.json.encode(document))[1:] == (b"hello", "text/plain")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"id": ""}, "id must not be empty"),
        ({"type": None}, "type missing"),
        ({"specversion": "0.3"}, "specversion must be 1.x, got '0.3'"),
        ({"time": "yesterday"}, "time"),
        ({"Bad-Name": "x"}, "'Bad-Name' cannot name an extension"),
        ({"data_base64": "%%%"}, "data_base64"),
    ],
)
def test_a_malformed_event_is_invalid_and_names_the_attribute(change: dict[str, Any], text: str) -> None:
    document = {**ATTRIBUTES, "specversion": "1.0", **change}
    document = {name: value for name, value in document.items() if value is not None}
    with pytest.raises(Invalid, match=text):
        cloudevents.unwrap(msgspec.json.encode(document))


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("payload", [{"id": 1}, "hello", b"\x00\xff"])
def test_an_app_publishes_and_receives_events_in_both_modes(structured: bool, payload: Any) -> None:
    app = App()
    seen: list[tuple[Any, CloudEvent | None]] = []

    @app.subscriber("orders")
    def handle(message: Message[Any]) -> None:
        seen.append((message.payload, message.event))
        message.ack()

    rehearsal = Rehearsal(app)
    app.publish("orders", payload, event=ours(), structured=structured)
    rehearsal.run_until_idle()
    ((received, event),) = seen
    assert received == payload
    assert event is not None
    assert event.attributes() == {**ours().attributes(), "datacontenttype": event.datacontenttype}


def test_a_message_that_is_no_event_has_none() -> None:
    app = App()
    seen: list[CloudEvent | None] = []

    @app.subscriber("orders")
    def handle(message: Message[Any]) -> None:
        seen.append(message.event)
        message.ack()

    rehearsal = Rehearsal(app)
    rehearsal.publish("orders", 1)
    rehearsal.run_until_idle()
    assert seen == [None]


def test_broken_event_headers_settle_the_message_as_invalid_when_asked_for() -> None:
    app = App()

    @app.subscriber("orders")
    def handle(message: Message[Any]) -> None:
        assert message.event is not None
        message.ack()

    rehearsal = Rehearsal(app)
    rehearsal.publish("orders", 1, id="m", headers={"ce-specversion": "1.0", "ce-id": "1"})
    rehearsal.run_until_idle()
    rehearsal.assert_settled("m", "reject")
    assert rehearsal.dead_letters("orders")[0].error == "CloudEvent: source, type missing"
