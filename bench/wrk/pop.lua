-- Pops; counts the messages that came and stops when there are none left.
local path
messages = 0
local threads = {}

function setup(thread) table.insert(threads, thread) end

function init(args) path = args[1] end

function request() return wrk.format("GET", path) end

function response(status, headers, body)
  local found, from = 0, 1
  while true do
    local _, last = string.find(body, '"transactionId"', from, true)
    if not last then break end
    found, from = found + 1, last
  end
  messages = messages + found
  if found == 0 then wrk.thread:stop() end
end

function done(summary)
  local total = 0
  for _, thread in ipairs(threads) do total = total + thread:get("messages") end
  io.write(string.format("messages %d in %d us\n", total, summary.duration))
end
