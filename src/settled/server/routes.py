"""The route table: each path of the API, who answers it, and what the API document says about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import bodies
from .inspection import DeadLetters, Inspection
from .openapi import Parameter
from .queues import Groups, Queues
from .router import Route
from .streams import Streams

if TYPE_CHECKING:
    from settled.queue.engine import Engine

    from .messages import Messages
    from .router import Endpoint
    from .system import System

P = Parameter
_POP = (
    P("batch", "integer", "How many messages at most.", 1, 10_000),
    P("wait", "boolean", "Wait for a message if there is none."),
    P("timeout", "integer", "How long to wait, in milliseconds.", 0, 3_600_000),
    P("consumerGroup", "string", "Consume as this group; without one, consumers share the queue."),
    P("autoAck", "boolean", "Acknowledge on delivery: at most once."),
    P("partitions", "integer", "Take from up to this many partitions.", 1, 1000),
    P("leaseSeconds", "integer", "How long the lease lasts, instead of the queue's leaseTime.", 0, 86_400),
    P(
        "subscriptionMode",
        "string",
        "Where a new group starts: all or new.",
        choices=("all", "new", "new-only"),
    ),
    P("subscriptionFrom", "string", "Where a new group starts: now, or an ISO 8601 time."),
    P("autopilot", "boolean", "Let the server choose batch and partitions."),
)
_SPACE = (P("namespace", "string", "Only this namespace."), P("task", "string", "Only this task."))
_PAGE = (
    P("limit", "integer", "Rows at most.", 1, 1000),
    P("offset", "integer", "Rows to skip.", 0, 2**31 - 1),
)
_SPAN = (
    P("from", "string", "From this ISO 8601 time."),
    P("to", "string", "Up to this ISO 8601 time; of a date, to its end."),
)
_QUEUE = P("queue", "string", "Only this queue.")
_PARTITION = P("partition", "string", "Only this partition.")
_GROUP = P("consumerGroup", "string", "Only this group.")
_METADATA = P("deleteMetadata", "boolean", "Forget the subscription too.")
_LISTED = (
    _QUEUE,
    _PARTITION,
    P("ns", "string", "Only this namespace."),
    _SPACE[1],
    *_SPAN,
    *_PAGE,
    P("status", "string", "Only these.", choices=("pending", "processing", "completed", "dead_letter")),
)


def routes(engine: Engine, m: Messages, push: Endpoint, sys: System, openapi: Endpoint) -> list[Route]:
    """Every route of the server."""
    q, g = Queues(engine), Groups(engine)
    d, i, s = DeadLetters(engine), Inspection(engine), Streams(engine)
    pop, groups, messages = "/api/v1/pop", "/api/v1/consumer-groups", "/api/v1/messages"
    one, seek = f"{messages}/{{partitionId}}/{{transactionId}}", f"{groups}/{{group}}/queues/{{queue}}"
    resources, upkeep = "/api/v1/resources", "/api/v1/system/maintenance"
    return [
        Route("POST", "/api/v1/push", push, "Push messages.", bodies.PushBody, (), m.push_soon),
        Route(
            "GET",
            f"{pop}/queue/{{queue}}",
            m.pop_queue,
            "Take messages of any partition.",
            None,
            _POP,
            m.pop_soon,
        ),
        Route(
            "GET",
            f"{pop}/queue/{{queue}}/partition/{{partition}}",
            m.pop_queue,
            "Take messages of one partition.",
            None,
            _POP,
        ),
        Route("GET", pop, m.pop_any, "Take messages of a namespace or task.", None, (*_POP, *_SPACE)),
        Route("POST", "/api/v1/ack", m.ack, "Settle one message.", bodies.AckBody, (), m.ack_soon),
        Route(
            "POST",
            "/api/v1/ack/batch",
            m.ack_batch,
            "Settle many messages.",
            bodies.AckBatchBody,
            (),
            m.ack_batch_soon,
        ),
        Route(
            "POST",
            "/api/v1/transaction",
            m.transaction,
            "Pushes and acks, all or nothing.",
            bodies.TransactionBody,
        ),
        Route("POST", "/api/v1/lease/{leaseId}/extend", m.extend, "Hold a lease longer.", bodies.ExtendBody),
        Route("POST", "/api/v1/configure", q.configure, "Create or configure a queue.", bodies.ConfigureBody),
        Route("GET", f"{resources}/queues", q.list, "All queues.", None, _SPACE),
        Route("GET", f"{resources}/queues/{{queue}}", q.one, "One queue with its partitions."),
        Route(
            "GET",
            f"{resources}/queues/{{queue}}/depth",
            q.depth,
            "How much is pending.",
            None,
            (P("group", "string", "For this group."),),
        ),
        Route("DELETE", f"{resources}/queues/{{queue}}", q.delete, "Delete a queue and all in it."),
        Route("DELETE", "/api/v1/queues/{queue}/clear", q.clear, "Drop all messages.", None, (_PARTITION,)),
        Route("GET", f"{resources}/partitions", q.partitions, "All partitions.", None, (_QUEUE,)),
        Route("GET", f"{resources}/namespaces", q.namespaces, "All namespaces."),
        Route("GET", f"{resources}/tasks", q.tasks, "All tasks."),
        Route("GET", f"{resources}/overview", q.overview, "Everything in a few figures."),
        Route("GET", messages, i.list, "Messages, newest first.", None, _LISTED),
        Route("GET", one, i.one, "One message and what each group did with it."),
        Route("DELETE", one, i.delete, "Take one message out."),
        Route("POST", f"{one}/retry", i.retry, "Put a message's dead letters back.", None, (_GROUP,)),
        Route("POST", f"{one}/dlq", i.bury, "Send a message to the dead letters.", None, (_GROUP,)),
        Route(
            "GET",
            "/api/v1/journal",
            i.journal,
            "How messages were settled.",
            None,
            (
                _QUEUE,
                P("partitionId", "string", "Of this partition."),
                P("transactionId", "string", "Of this message."),
                _PAGE[0],
            ),
        ),
        Route(
            "GET", "/api/v1/dlq", d.list, "Dead letters.", None, (_QUEUE, _PARTITION, _GROUP, *_SPAN, *_PAGE)
        ),
        Route("POST", "/api/v1/dlq/{id}/retry", d.requeue, "Put a dead letter back."),
        Route("DELETE", "/api/v1/dlq/{id}", d.delete, "Drop a dead letter."),
        Route("GET", groups, g.list, "Consumer groups and their lag.", None, (_QUEUE,)),
        Route(
            "GET",
            f"{groups}/lagging",
            g.lagging,
            "Partitions where a group lags.",
            None,
            (P("minLagSeconds", "integer", "At least so long.", 0, 2**31 - 1),),
        ),
        Route("GET", f"{groups}/{{group}}", g.one, "One group by partition."),
        Route("DELETE", f"{groups}/{{group}}", g.delete, "Forget a group.", None, (_METADATA,)),
        Route("DELETE", seek, g.delete, "Forget a group on one queue.", None, (_METADATA,)),
        Route(
            "POST",
            f"{groups}/{{group}}/subscription",
            g.subscribe,
            "Where the group starts.",
            bodies.SubscriptionBody,
        ),
        Route("POST", f"{seek}/seek", g.seek, "Move a group.", bodies.SeekBody),
        Route(
            "POST",
            f"{seek}/partitions/{{partition}}/seek",
            g.seek,
            "Move a group on one partition.",
            bodies.SeekBody,
        ),
        Route("POST", "/api/v1/traces", i.trace, "Leave a note on a message.", bodies.TraceBody),
        Route("GET", "/api/v1/traces/{partitionId}/{transactionId}", i.traces, "The notes on a message."),
        Route("GET", "/api/v1/traces/by-name/{name}", i.traces_by_name, "The notes of a name.", None, _PAGE),
        Route("GET", "/api/v1/traces/names", i.trace_names, "The names in use.", None, _PAGE),
        Route("POST", "/streams/v1/queries", s.register, "Register a stream query.", bodies.StreamQueryBody),
        Route("POST", "/streams/v1/state/get", s.state, "Read a query's state.", bodies.StateGetBody),
        Route("POST", "/streams/v1/cycle", s.cycle, "State, pushes and ack of a cycle.", bodies.CycleBody),
        Route("GET", upkeep, sys.maintenance, "Whether pushes are held back."),
        Route(
            "POST",
            upkeep,
            sys.maintenance,
            "Hold pushes back in a file, or push them and go on.",
            bodies.SwitchBody,
        ),
        Route("GET", f"{upkeep}/pop", sys.pop_maintenance, "Whether pops are switched off."),
        Route("POST", f"{upkeep}/pop", sys.pop_maintenance, "Switch pops off or on.", bodies.SwitchBody),
        Route("POST", "/api/v1/stats/refresh", sys.refresh, "Do a round of housekeeping now."),
        Route("GET", "/api/v1/status", sys.status, "Figures for a dashboard.", None, (_QUEUE, *_SPACE)),
        Route("GET", "/api/v1/status/queues", sys.queues, "All queues in figures."),
        Route("GET", "/api/v1/status/queues/{queue}", sys.queue, "One queue in figures."),
        Route(
            "GET", "/api/v1/status/queues/{queue}/messages", i.of_queue, "A queue's messages.", None, _PAGE
        ),
        Route(
            "GET", "/api/v1/status/analytics", sys.status, "Figures for a dashboard.", None, (_QUEUE, *_SPACE)
        ),
        Route("GET", "/api/v1/status/buffers", sys.buffers, "Pushes held back: none, ever."),
        Route("GET", "/api/v1/analytics/system-metrics", sys.figures, "Processes in figures."),
        Route("GET", "/api/v1/analytics/worker-metrics", sys.figures, "Processes in figures."),
        Route("GET", "/health", sys.health, "Whether the server and its database work."),
        Route("GET", "/metrics", sys.metrics, "Prometheus metrics."),
        Route("GET", "/metrics/prometheus", sys.metrics, "Prometheus metrics."),
        Route("GET", "/openapi.json", openapi, "This document."),
    ]
