-- Moves up to ARGV[1] messages from the queue to this consumer; first, what is due to the queue.
-- KEYS: queue, processing, scheduled. Answers {ms until the next is due, or -1; messages}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local taken = {}
for _, message in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do
  redis.call('RPUSH', KEYS[1], message)
  redis.call('ZREM', KEYS[3], message)
end
while #taken < tonumber(ARGV[1]) do
  local message = redis.call('LMOVE', KEYS[1], KEYS[2], 'RIGHT', 'LEFT')
  if not message then break end
  table.insert(taken, message)
end
local first = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
return {first[2] and math.max(0, tonumber(first[2]) - now) or -1, taken}
