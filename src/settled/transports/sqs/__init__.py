"""`sqs://`: Amazon SQS, standard and FIFO queues."""

from settled.transports.sqs.queues import Queue
from settled.transports.sqs.transport import SqsTransport

__all__ = ["Queue", "SqsTransport"]
