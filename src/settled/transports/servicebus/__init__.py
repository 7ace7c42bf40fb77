"""`servicebus://`: Azure Service Bus queues, topic subscriptions and sessions."""

from settled.transports.servicebus.settings import Entity
from settled.transports.servicebus.transport import ServiceBusTransport

__all__ = ["Entity", "ServiceBusTransport"]
