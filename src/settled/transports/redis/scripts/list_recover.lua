-- Gives back what consumers have that are not alive, or what the one of ARGV[1] has.
-- KEYS: queue, consumers, what their lists and their signs of life are called without their name (two keys).
local back = 0
local function recover(name)
  while redis.call('LMOVE', KEYS[3] .. name, KEYS[1], 'LEFT', 'RIGHT') do back = back + 1 end
  redis.call('SREM', KEYS[2], name)
  redis.call('DEL', KEYS[4] .. name)
end
if ARGV[1] ~= '' then
  recover(ARGV[1])
else
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    if redis.call('EXISTS', KEYS[4] .. name) == 0 then recover(name) end
  end
end
return back
