-- Settles a message, if it is still this consumer's; answers whether it was.
-- KEYS: queue, processing, scheduled, dead letters. ARGV: the message, what to do, the message or letter to write, delay in ms.
if not redis.call('LPOS', KEYS[2], ARGV[1]) then return 0 end
local what = ARGV[2]
if what == 'wrap' then
  redis.call('LPUSH', KEYS[2], ARGV[3])
elseif what == 'reject' then
  redis.call('LPUSH', KEYS[4], ARGV[3])
elseif what == 'requeue' and tonumber(ARGV[4]) > 0 then
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4], ARGV[3])
elseif what == 'requeue' or what == 'nack' then
  redis.call('RPUSH', KEYS[1], ARGV[3])
end
redis.call('LREM', KEYS[2], 1, ARGV[1])
return 1
