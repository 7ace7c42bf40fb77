-- Acknowledges entries, each if it is still this consumer's; answers for each whether it was.
-- KEYS: stream. ARGV: group, consumer, whether to delete, then id and attempt of each.
local answers = {}
for at = 4, #ARGV, 2 do
  local id = ARGV[at]
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)
  local ours = #pending > 0 and pending[1][2] == ARGV[2] and pending[1][4] == tonumber(ARGV[at + 1])
  if ours then
    redis.call('XACK', KEYS[1], ARGV[1], id)
    if ARGV[3] == '1' then redis.call('XDEL', KEYS[1], id) end
  end
  table.insert(answers, ours and 1 or 0)
end
return answers
