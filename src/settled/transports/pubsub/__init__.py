"""`pubsub://`: Google Cloud Pub/Sub."""

from settled.transports.pubsub.settings import Subscription
from settled.transports.pubsub.transport import PubSubTransport

__all__ = ["PubSubTransport", "Subscription"]
