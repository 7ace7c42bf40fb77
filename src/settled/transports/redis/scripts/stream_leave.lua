-- Removes this consumer, and others of ours that have been gone for an hour, unless something is pending for them:
-- that would be forgotten with them. KEYS: stream. ARGV: group, consumer, prefix of our names, the name of nobody.
local removed = 0
for _, facts in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local one = {}
  for at = 1, #facts, 2 do one[facts[at]] = facts[at + 1] end
  local ours = string.sub(one.name, 1, #ARGV[3]) == ARGV[3] and one.name ~= ARGV[4] and one.idle > 3600000
  if one.pending == 0 and (one.name == ARGV[2] or ours) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], one.name)
    removed = removed + 1
  end
end
return removed
