"""Redis and Valkey: streams with a consumer group, and lists."""

from settled.transports.redis.settings import RedisList, RedisStream
from settled.transports.redis.transport import RedisTransport

__all__ = ["RedisList", "RedisStream", "RedisTransport"]
