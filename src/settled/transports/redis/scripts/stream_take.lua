-- Claims what is due again, and with ARGV[6] what a dead consumer left; adds what was published with a delay.
-- KEYS: stream, due, scheduled. ARGV: group, consumer, the name of nobody, limit, lease in ms, whether to look at leases.
-- Answers {ms until the next is due, or -1; entries as {id, attempt, fields}; ids whose entry was trimmed away}.
local group, consumer, nobody = ARGV[1], ARGV[2], ARGV[3]
local limit, lease = tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local taken, trimmed = {}, {}

for _, packed in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do
  local headers, id, data = string.match(packed, '^([^\n]*)\n([^\n]*)\n(.*)$')
  redis.call('XADD', KEYS[1], '*', 'id', cjson.decode(id)[1], 'headers', headers, 'data', data)
  redis.call('ZREM', KEYS[3], packed)
end

local function claim(id)
  redis.call('ZREM', KEYS[2], id)
  local pending = redis.call('XPENDING', KEYS[1], group, id, id, 1)
  if #pending == 0 then return end
  local entries = redis.call('XCLAIM', KEYS[1], group, consumer, 0, id)
  if #entries == 0 or not entries[1] or not entries[1][2] then
    redis.call('XACK', KEYS[1], group, id)
    table.insert(trimmed, id)
  else
    table.insert(taken, {id, pending[1][4] + 1, entries[1][2]})
  end
end

if redis.call('EXISTS', KEYS[2]) == 1 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, limit)) do claim(id) end
end

if ARGV[6] == '1' and #taken < limit then
  for _, pending in ipairs(redis.call('XPENDING', KEYS[1], group, 'IDLE', lease, '-', '+', limit - #taken)) do
    local due = tonumber(redis.call('ZSCORE', KEYS[2], pending[1]) or 0)
    if due > now then
      -- A delay longer than a lease: looked at again when due, or a lease from now.
      redis.call('XCLAIM', KEYS[1], group, nobody, 0, pending[1], 'IDLE', math.max(0, lease - (due - now)), 'JUSTID')
    else
      claim(pending[1])
    end
  end
end

local next = -1
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first[2] then
    local wait = math.max(0, tonumber(first[2]) - now)
    if next < 0 or wait < next then next = wait end
  end
end
return {next, taken, trimmed}
