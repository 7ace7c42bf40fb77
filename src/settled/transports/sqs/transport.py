"""The transport: a client of the API a loop, its queues, and publishing."""

from __future__ import annotations

import contextlib
import functools
import math
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from settled.signals import ConfigurationError
from settled.transports.base import AsyncChannel, BrokerStatus, Outgoing, Published, Source
from settled.transports.looped import LoopTransport
from settled.transports.sqs.channel import CAPABILITIES, SqsChannel
from settled.transports.sqs.queues import DEFAULTS, Found, Queue, Redrive
from settled.transports.sqs.wire import body_of, in_attributes
from settled.transports.urls import flag, parse, seconds

_LONGEST_DELAY = 900
_REFUSED = {"InvalidMessageContents", "InvalidParameterValue", "InvalidParameterValueException"}
_MISSING = {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"}


@functools.cache
def _session(profile: str | None) -> Any:
    """One for all: reading the description of the API takes longer than anything else here."""
    session = get_session()
    if profile is not None:
        session.set_config_variable("profile", profile)
    return session


class _Client:
    """A client of the SQS API, and what keeps it open."""

    def __init__(self, open_until: contextlib.AsyncExitStack, api: Any) -> None:
        self.api = api
        self._open_until = open_until

    async def close(self) -> None:
        await self._open_until.aclose()


class SqsTransport(LoopTransport[_Client]):
    """Amazon SQS, by region, or by the address of something that speaks its API.

    Credentials, profiles and everything else come the way boto finds them.

    >>> SqsTransport("sqs://eu-west-1").broker().detail
    'not connected to eu-west-1'
    """

    capabilities = CAPABILITIES
    variants = MappingProxyType({"FIFO queues": replace(CAPABILITIES, lanes=True)})

    def __init__(self, url: str) -> None:
        super().__init__()
        known: dict[str, Callable[[str], Any]] = {
            "backoff": seconds,
            "create": flag,
            "profile": str,
            "region": str,
            "tls": flag,
            "visibility": int,
            "wait": int,
        }
        parts, options = parse(url, known)
        if parts.username is not None or parts.path.strip("/"):
            raise ConfigurationError(
                "sqs: the URL has a region or an endpoint only, as in sqs://eu-west-1; credentials come from "
                "boto's own chain: environment, profile or role"
            )
        host = parts.hostname or ""
        self._endpoint: str | None = None
        if parts.port is not None or "." in host:
            scheme = "https" if options.pop("tls", parts.port is None) else "http"
            self._endpoint = f"{scheme}://{parts.netloc}"
        self._region = options.pop("region", None) or (host if self._endpoint is None else None) or None
        self._profile = options.pop("profile", None)
        options.pop("tls", None)
        self._defaults = Queue(**options).over(DEFAULTS)
        self._where = self._endpoint or self._region or "the region of boto's configuration"
        self._trouble: str | None = f"not connected to {self._where}"
        self._queues: dict[str, Found] = {}

    async def connect(self) -> _Client:
        async with contextlib.AsyncExitStack() as stack:
            # A performer has a long poll under way nearly all the time.
            config = AioConfig(max_pool_connections=200, connect_timeout=5, retries={"mode": "standard"})
            client = _session(self._profile).create_client(
                "sqs", region_name=self._region, endpoint_url=self._endpoint, config=config
            )
            api = await stack.enter_async_context(client)
            return _Client(stack.pop_all(), api)

    async def call(self, operation: str, **arguments: Any) -> Any:
        """An operation of the API; remembers whether SQS could be reached."""
        client = await self.connection()
        asked: Awaitable[Any] = getattr(client.api, operation)(**arguments)
        try:
            answer = await asked
        except BotoCoreError as error:
            self._trouble = f"{self._where}: {error}"
            raise
        except ClientError:
            self._trouble = None
            raise
        self._trouble = None
        return answer

    def refuses(self, error: Exception) -> bool:
        if isinstance(error, ClientError):
            return error.response["Error"]["Code"].rpartition("#")[2] in _REFUSED
        return isinstance(error, (ParamValidationError, UnicodeError))

    def broker(self) -> BrokerStatus:
        return BrokerStatus(connected=self._trouble is None, detail=self._trouble or self._where)

    def settings(self, source: Source) -> Queue:
        """How a subscription reads."""
        match source.settings:
            case None:
                return self._defaults
            case Queue() as settings:
                return settings.over(self._defaults)
            case other:
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: source must be a sqs.Queue, got {other!r}"
                )

    async def prepare(self, source: Source) -> None:
        """Look up, or make, the queue and those its rejects go to."""
        if source.group is not None:
            raise ConfigurationError(
                f"subscriber {source.channel!r}: SQS has no groups, got group={source.group!r}; "
                "give each group a queue of its own, on an SNS topic say"
            )
        settings = self.settings(source)
        queue = await self.queue(source.channel, settings)
        rejects = {source.dead_letter or queue.dead_letters, source.invalid} - {None}
        for name in rejects:
            await self.queue(str(name), settings)

    async def queue(self, name: str, settings: Queue | None = None) -> Found:
        """A queue by its name, looked up once."""
        found = self._queues.get(name)
        if found is None:
            found = self._queues[name] = await self._look_up(name, settings or self._defaults)
        return found

    async def _look_up(self, name: str, settings: Queue) -> Found:
        try:
            url = (await self.call("get_queue_url", QueueName=name))["QueueUrl"]
        except ClientError as error:
            if error.response["Error"]["Code"] not in _MISSING:
                raise
            if not settings.create:
                raise ConfigurationError(
                    f"sqs: no queue {name!r} in {self._where}; run: aws sqs create-queue --queue-name {name}"
                    f"{' --attributes FifoQueue=true' if name.endswith('.fifo') else ''}, or say create=True"
                ) from error
            made = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
            url = (await self.call("create_queue", QueueName=name, Attributes=made))["QueueUrl"]
        facts = (await self.call("get_queue_attributes", QueueUrl=url, AttributeNames=["All"]))["Attributes"]
        limit, dead = None, None
        if "RedrivePolicy" in facts:
            policy = msgspec.json.decode(facts["RedrivePolicy"], type=Redrive)
            limit, dead = int(policy.max_receive_count), policy.dead_letter_target_arn.rpartition(":")[2]
        return Found(
            name=name, url=url, visibility=int(facts["VisibilityTimeout"]), max_attempts=limit, dead=dead
        )

    def async_channel(self, source: Source) -> AsyncChannel:
        return SqsChannel(self, source, self.settings(source), self._queues.get(source.channel))

    async def push(self, message: Outgoing) -> Published:
        """Send; in a FIFO queue the lane is the message group, and the id keeps duplicates out for 5 min."""
        queue = await self.queue(message.subject)
        body, encoding = body_of(message.data)
        ours = {"settled-encoding": encoding, "settled-id": message.id}
        arguments: dict[str, Any] = {
            "QueueUrl": queue.url,
            "MessageBody": body,
            "MessageAttributes": in_attributes(message.headers, ours),
        }
        if queue.fifo:
            arguments["MessageGroupId"] = message.lane or "settled"
            arguments["MessageDeduplicationId"] = _dedup_id(message.id)
        elif message.lane is not None:
            # A standard queue takes a group for fairness among tenants, and promises no order.
            arguments["MessageGroupId"] = message.lane
        if message.delay > 0:
            if queue.fifo or message.delay > _LONGEST_DELAY:
                raise ConfigurationError(
                    f"publish to {message.subject!r}: delay={message.delay:g}: SQS delays by at most "
                    f"{_LONGEST_DELAY} s, and a FIFO queue only as a whole"
                )
            arguments["DelaySeconds"] = math.ceil(message.delay)
        sent = await self.call("send_message", **arguments)
        return Published(id=message.id or sent["MessageId"], lane=message.lane)


def _dedup_id(identity: str | None) -> str:
    """An id that SQS takes: at most 128 letters, digits and punctuation marks."""
    if identity is None:
        return uuid.uuid4().hex
    if len(identity) <= 128 and identity.isascii() and identity.isprintable() and " " not in identity:
        return identity
    return uuid.uuid5(uuid.NAMESPACE_OID, identity).hex
