"""RabbitMQ: quorum and classic queues, with parked retries and confirmed dead letters."""

from settled.transports.rabbitmq.link import PublishFailed
from settled.transports.rabbitmq.queues import RabbitQueue
from settled.transports.rabbitmq.transport import RabbitTransport

__all__ = ["PublishFailed", "RabbitQueue", "RabbitTransport"]
