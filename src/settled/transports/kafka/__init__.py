"""Kafka: classic consumer groups, in order; and share groups."""

from settled.transports.kafka.settings import KafkaTopic
from settled.transports.kafka.transport import KafkaTransport

__all__ = ["KafkaTopic", "KafkaTransport"]
