-- Settles an entry, if it is still this consumer's; answers whether it was.
-- KEYS: stream, due, dead letters. ARGV: group, consumer, the name of nobody, id, attempt, lease in ms, what to do, ...
local group, consumer, nobody, id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local attempt, lease, what = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local pending = redis.call('XPENDING', KEYS[1], group, id, id, 1)
if #pending == 0 or pending[1][2] ~= consumer or pending[1][4] ~= attempt then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

if what == 'extend' then
  redis.call('XCLAIM', KEYS[1], group, consumer, 0, id, 'JUSTID')
elseif what == 'nack' then
  -- Due since it was added, so the oldest comes first; and this delivery did not count.
  redis.call('XCLAIM', KEYS[1], group, nobody, 0, id, 'IDLE', lease, 'RETRYCOUNT', attempt - 1, 'JUSTID')
  redis.call('ZADD', KEYS[2], math.min(now, tonumber(string.match(id, '^%d+'))), id)
elseif what == 'requeue' then
  local delay = tonumber(ARGV[8])
  redis.call('XCLAIM', KEYS[1], group, nobody, 0, id, 'IDLE', math.max(0, lease - delay), 'JUSTID')
  redis.call('ZADD', KEYS[2], now + delay, id)
else
  redis.call('XADD', KEYS[3], '*', unpack(ARGV, 9))
  redis.call('XACK', KEYS[1], group, id)
  if ARGV[8] == '1' then redis.call('XDEL', KEYS[1], id) end
end
return 1
