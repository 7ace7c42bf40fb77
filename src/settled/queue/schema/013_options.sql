-- These options had no effect, whatever was stored: keep what queues do, now that they have one.
update queue set options = options || '{"ttl": 0, "deadLetterQueue": true, "dlqAfterMaxRetries": true}';
