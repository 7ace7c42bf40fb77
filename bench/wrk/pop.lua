-- Pops; counts the messages that came and stops when there are none left.
local get, now
messages, first, last = 0, 0, 0
local threads = {}

function setup(thread) table.insert(threads, thread) end

function init(args)
  get = wrk.format("GET", args[1])
  now = dofile(args[2])
end

function request()
  if first == 0 then first = now() end
  return get
end

-- Counts by a text whose first letter is rare: the search leaps from one to the next.
function response(status, headers, body)
  local found, from = 0, 1
  while true do
    local _, at = string.find(body, 'sactionId', from, true)
    if not at then break end
    found, from = found + 1, at
  end
  if found == 0 then
    wrk.thread:stop()
    return
  end
  messages, last = messages + found, now()
end

function done(summary)
  local total, spent = 0, 1
  for _, thread in ipairs(threads) do
    total = total + thread:get("messages")
    spent = math.max(spent, thread:get("last") - thread:get("first"))
  end
  io.write(string.format("messages %d in %d us\n", total, spent))
end
