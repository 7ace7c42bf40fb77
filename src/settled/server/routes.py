"""The route table: each path of the API, who answers it, and what the API document says about it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from . import answers, bodies, inspection, messages, queues, streams, system
from .inspection import DeadLetters, Inspection
from .openapi import Answered, Delivery, Parameter, PushedItem, PushFailed
from .parse import SUBSCRIPTION_MODES
from .queues import Groups, Queues
from .router import Route
from .schemas import START, TIME
from .streams import Streams

if TYPE_CHECKING:
    from settled.queue.engine import Engine

    from .messages import Messages
    from .router import Endpoint, Shortcut
    from .system import System

P, A = Parameter, Answered
post = partial(Route, "POST")
_POPPED = A(Delivery, (409,))
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
        "Where a new group starts: all (or from_beginning), or new (or new-only).",
        choices=tuple(SUBSCRIPTION_MODES),
    ),
    P("subscriptionFrom", "string", "Where a new group starts: now, or an ISO 8601 time.", told=START),
    P("autopilot", "boolean", "Let the server choose batch and partitions; implies releaseRest."),
    P("releaseRest", "boolean", "A nack gives back what is unsettled of its partition's batch."),
)
_SPACE = (P("namespace", "string", "Only this namespace."), P("task", "string", "Only this task."))
_PAGE = (
    P("limit", "integer", "Rows at most.", 1, 1000),
    P("offset", "integer", "Rows to skip.", 0, 2**31 - 1),
)
_SPAN = (
    P("from", "string", "From this ISO 8601 time.", told=TIME),
    P("to", "string", "Up to this ISO 8601 time; of a date, to its end.", told=TIME),
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


def get(
    path: str,
    endpoint: Endpoint,
    summary: str,
    answer: Answered,
    parameters: tuple[Parameter, ...] = (),
    shortcut: Shortcut | None = None,
) -> Route:
    """A route without a body."""
    return Route("GET", path, endpoint, summary, answer, None, parameters, shortcut)


def delete(
    path: str, endpoint: Endpoint, summary: str, answer: Answered, parameters: tuple[Parameter, ...] = ()
) -> Route:
    """A route without a body, too."""
    return Route("DELETE", path, endpoint, summary, answer, None, parameters)


def routes(engine: Engine, m: Messages, push: Endpoint, sys: System, openapi: Endpoint) -> list[Route]:
    """Every route of the server."""
    q, g = Queues(engine), Groups(engine)
    d, i, s = DeadLetters(engine), Inspection(engine), Streams(engine)
    pop, groups, listing = "/api/v1/pop", "/api/v1/consumer-groups", "/api/v1/messages"
    one, seek = f"{listing}/{{partitionId}}/{{transactionId}}", f"{groups}/{{group}}/queues/{{queue}}"
    resources, upkeep = "/api/v1/resources", "/api/v1/system/maintenance"
    return [
        post(
            "/api/v1/push",
            push,
            "Push messages; each partition is stored for itself.",
            A(list[PushedItem], (409, 429), 201, {503: PushFailed}),
            bodies.PushBody,
            (),
            m.push_soon,
        ),
        get(
            f"{pop}/queue/{{queue}}",
            m.pop_queue,
            "Take messages of any partition.",
            _POPPED,
            _POP,
            m.pop_soon,
        ),
        get(
            f"{pop}/queue/{{queue}}/partition/{{partition}}",
            m.pop_queue,
            "Take messages of one partition.",
            _POPPED,
            _POP,
        ),
        get(pop, m.pop_any, "Take messages of a namespace or task.", _POPPED, (*_POP, *_SPACE)),
        post(
            "/api/v1/ack",
            m.ack,
            "Settle one message.",
            A(answers.Acked, refused={404: answers.Acked, 409: answers.Acked}),
            bodies.AckBody,
            (),
            m.ack_soon,
        ),
        post(
            "/api/v1/ack/batch",
            m.ack_batch,
            "Settle many messages.",
            A(list[answers.Acked], refused={409: messages.BatchRefused}),
            bodies.AckBatchBody,
            (),
            m.ack_batch_soon,
        ),
        post(
            "/api/v1/transaction",
            m.transaction,
            "Pushes and acks, all or nothing.",
            A(messages.Transacted, (429,), refused={409: messages.TransactionRefused}),
            bodies.TransactionBody,
        ),
        post(
            "/api/v1/lease/{leaseId}/extend",
            m.extend,
            "Hold a lease longer.",
            A(messages.Extended, refused={404: messages.Extended, 409: messages.Extended}),
            bodies.ExtendBody,
        ),
        post(
            "/api/v1/configure",
            q.configure,
            "Create a queue, or change its options: what is left out keeps its value.",
            A(queues.ConfiguredQueue, (404, 409)),
            bodies.ConfigureBody,
        ),
        get(f"{resources}/queues", q.list, "All queues.", A(system.QueueList), _SPACE),
        get(
            f"{resources}/queues/{{queue}}",
            q.one,
            "One queue with its partitions, some at a time.",
            A(system.QueueDetail, (404,)),
            _PAGE,
        ),
        get(
            f"{resources}/queues/{{queue}}/depth",
            q.depth,
            "How much is pending.",
            A(queues.Depth, (404,)),
            (P("group", "string", "For this group."), *_PAGE),
        ),
        delete(f"{resources}/queues/{{queue}}", q.delete, "Delete a queue and all in it.", A(queues.Deleted)),
        delete(
            "/api/v1/queues/{queue}/clear",
            q.clear,
            "Drop all messages.",
            A(queues.Cleared, (404,)),
            (_PARTITION,),
        ),
        get(
            f"{resources}/partitions",
            q.partitions,
            "All partitions.",
            A(queues.PartitionList, (404,)),
            (_QUEUE, *_PAGE),
        ),
        get(f"{resources}/namespaces", q.namespaces, "All namespaces.", A(queues.NamespaceList)),
        get(f"{resources}/tasks", q.tasks, "All tasks.", A(queues.TaskList)),
        get(f"{resources}/overview", q.overview, "Everything in a few figures.", A(queues.Overview)),
        get(listing, i.list, "Messages, newest first.", A(inspection.MessageList, (409,)), _LISTED),
        get(
            one,
            i.one,
            "One message and what each group did with it.",
            A(inspection.MessageDetail, (404, 409)),
        ),
        delete(one, i.delete, "Take one message out.", A(inspection.MessageDeleted, (404, 409))),
        post(
            f"{one}/retry",
            i.retry,
            "Put a message's dead letters back.",
            A(inspection.MessageRetried, (404, 409, 429)),
            None,
            (_GROUP,),
        ),
        post(
            f"{one}/dlq",
            i.bury,
            "Send a message to the dead letters.",
            A(inspection.Buried, (404, 409)),
            None,
            (_GROUP,),
        ),
        get(
            "/api/v1/journal",
            i.journal,
            "How messages were settled.",
            A(inspection.Journal, (404, 409)),
            (
                _QUEUE,
                P("partitionId", "string", "Of this partition.", told={"format": "uuid"}),
                P("transactionId", "string", "Of this message."),
                _PAGE[0],
            ),
        ),
        get(
            "/api/v1/dlq",
            d.list,
            "Dead letters.",
            A(inspection.DeadLetterPage),
            (
                _QUEUE,
                _PARTITION,
                _GROUP,
                *_SPAN,
                P("error", "string", "With this in the error, in any case."),
                *_PAGE,
            ),
        ),
        get("/api/v1/dlq/{id}", d.one, "One dead letter.", A(inspection.DeadLetterRow, (404,))),
        post(
            "/api/v1/dlq/retry",
            d.retry_many,
            "Put many dead letters back, by filter.",
            A(inspection.DeadLettersDone, (409,)),
            bodies.DeadLettersBody,
        ),
        post(
            "/api/v1/dlq/purge",
            d.purge_many,
            "Drop many dead letters, by filter.",
            A(inspection.DeadLettersDone),
            bodies.DeadLettersBody,
        ),
        post(
            "/api/v1/dlq/{id}/retry",
            d.requeue,
            "Put a dead letter back.",
            A(inspection.Requeued, (404, 409, 429)),
        ),
        post(
            "/api/v1/dlq/{id}/replay",
            d.requeue,
            "Put a dead letter back, by the name that Queen MQ gives this.",
            A(inspection.Requeued, (404, 409, 429)),
        ),
        delete("/api/v1/dlq/{id}", d.delete, "Drop a dead letter.", A(inspection.Dropped, (404,))),
        get(groups, g.list, "Consumer groups and their lag.", A(queues.GroupList), (_QUEUE,)),
        get(
            f"{groups}/lagging",
            g.lagging,
            "Partitions where a group lags.",
            A(list[system.LaggingLane]),
            (P("minLagSeconds", "integer", "At least so long.", 0, 2**31 - 1),),
        ),
        get(f"{groups}/{{group}}", g.one, "One group by partition.", A(dict[str, queues.GroupQueue], (404,))),
        delete(f"{groups}/{{group}}", g.delete, "Forget a group.", A(queues.GroupDeleted), (_METADATA,)),
        delete(seek, g.delete, "Forget a group on one queue.", A(queues.GroupDeleted, (404,)), (_METADATA,)),
        post(
            f"{groups}/{{group}}/subscription",
            g.subscribe,
            "Where the group starts.",
            A(queues.Subscribed),
            bodies.SubscriptionBody,
        ),
        post(f"{seek}/seek", g.seek, "Move a group.", A(queues.Sought, (404,)), bodies.SeekBody),
        post(
            f"{seek}/partitions/{{partition}}/seek",
            g.seek,
            "Move a group on one partition.",
            A(queues.Sought, (404,)),
            bodies.SeekBody,
        ),
        post(
            "/api/v1/traces",
            i.trace,
            "Leave a note on a message.",
            A(inspection.TraceLeft, (404, 409), 201),
            bodies.TraceBody,
        ),
        get(
            "/api/v1/traces/{partitionId}/{transactionId}",
            i.traces,
            "The notes on a message.",
            A(inspection.TraceList, (404,)),
        ),
        get(
            "/api/v1/traces/by-name/{name}",
            i.traces_by_name,
            "The notes of a name.",
            A(inspection.TracePage, (409,)),
            _PAGE,
        ),
        get("/api/v1/traces/names", i.trace_names, "The names in use.", A(inspection.TraceNamePage), _PAGE),
        post(
            "/streams/v1/queries",
            s.register,
            "Register a stream query.",
            A(streams.RegisteredQuery, (409,)),
            bodies.StreamQueryBody,
        ),
        post(
            "/streams/v1/state/get",
            s.state,
            "Read a query's state.",
            A(streams.StateAnswer, (404,)),
            bodies.StateGetBody,
        ),
        post(
            "/streams/v1/cycle",
            s.cycle,
            "State, pushes and ack of a cycle.",
            A(streams.CycleAnswer, (404, 409, 429)),
            bodies.CycleBody,
        ),
        get(upkeep, sys.maintenance, "Whether pushes are held back.", A(system.PushMaintenance)),
        post(
            upkeep,
            sys.maintenance,
            "Hold pushes back in a file, or push them and go on.",
            A(system.PushMaintenance),
            bodies.SwitchBody,
        ),
        get(f"{upkeep}/pop", sys.pop_maintenance, "Whether pops are switched off.", A(system.PopMaintenance)),
        post(
            f"{upkeep}/pop",
            sys.pop_maintenance,
            "Switch pops off or on.",
            A(system.PopMaintenance),
            bodies.SwitchBody,
        ),
        post("/api/v1/stats/refresh", sys.refresh, "Do a round of housekeeping now.", A(system.Refreshed)),
        get("/api/v1/status", sys.status, "Figures for a dashboard.", A(system.Status), (_QUEUE, *_SPACE)),
        get("/api/v1/status/queues", sys.queues, "All queues in figures.", A(system.QueueList)),
        get(
            "/api/v1/status/queues/{queue}",
            sys.queue,
            "One queue in figures.",
            A(system.QueueStatus, (404,)),
            _PAGE,
        ),
        get(
            "/api/v1/status/queues/{queue}/messages",
            i.of_queue,
            "A queue's messages.",
            A(inspection.QueueMessages, (409,)),
            _PAGE,
        ),
        get(
            "/api/v1/status/analytics",
            sys.status,
            "Figures for a dashboard.",
            A(system.Status),
            (_QUEUE, *_SPACE),
        ),
        get(
            "/api/v1/status/buffers",
            sys.buffers,
            "Pushes that are held back.",
            A(system.Buffers, database=False),
        ),
        get(
            "/api/v1/analytics/system-metrics",
            sys.figures,
            "Processes in figures.",
            A(system.Workers, database=False),
        ),
        get(
            "/api/v1/analytics/worker-metrics",
            sys.figures,
            "Processes in figures.",
            A(system.Workers, database=False),
        ),
        get(
            "/health",
            sys.health,
            "Whether the server and its database work.",
            A(system.Health, refused={503: system.Unhealthy}),
        ),
        get(
            "/readyz",
            sys.ready,
            "Whether pushes can be stored.",
            A(system.Ready, refused={503: system.Unready}),
        ),
        get("/livez", sys.live, "Whether the server runs.", A(system.Live, database=False)),
        get("/", sys.index, "What this is, and where to look.", A(system.Index, database=False)),
        get("/metrics", sys.metrics, "Prometheus metrics.", A(str, database=False)),
        get("/metrics/prometheus", sys.metrics, "Prometheus metrics.", A(str, database=False)),
        get("/openapi.json", openapi, "This document.", A(dict[str, Any], database=False)),
    ]
