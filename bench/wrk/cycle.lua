-- Pops a batch under a lease, then acks it in one call; counts the messages that were acked.
local path
messages, refused = 0, 0
local ready, sizes = {}, {}
local threads = {}

function setup(thread) table.insert(threads, thread) end

function init(args)
  path = args[1]
  wrk.headers["content-type"] = "application/json"
end

function request()
  local body = table.remove(ready)
  if body then return wrk.format("POST", "/api/v1/ack/batch", nil, body) end
  return wrk.format("GET", path)
end

-- The text between two marks, and where it ends; no patterns, which would cost more than the server does.
local function between(text, before, after, from)
  local _, start = string.find(text, before, from, true)
  if not start then return end
  local stop = string.find(text, after, start + 1, true)
  return string.sub(text, start + 1, stop - 1), stop
end

function response(status, headers, body)
  if string.sub(body, 1, 1) == "[" then
    local at = 0
    while true do
      _, at = string.find(body, '"success":true', at + 1, true)
      if not at then return end
      messages = messages + 1
    end
  end
  if status ~= 200 then refused = refused + 1 return end
  -- A pop without `partitions` comes from one partition, named before the messages, under one lease.
  local part, at = between(body, '"partitionId":"', '"', 1)
  if not part then return end
  local lease
  lease, at = between(body, '"leaseId":"', '"', at)
  local rest = '","partitionId":"' .. part .. '","leaseId":"' .. lease .. '"}'
  local acks, tx = {}, nil
  while true do
    tx, at = between(body, '"transactionId":"', '"', at)
    if not tx then break end
    acks[#acks + 1] = '{"transactionId":"' .. tx .. rest
  end
  if #acks > 0 then ready[#ready + 1] = '{"acknowledgments":[' .. table.concat(acks, ",") .. ']}' end
end

function done(summary)
  local total, bad = 0, 0
  for _, thread in ipairs(threads) do
    total = total + thread:get("messages")
    bad = bad + thread:get("refused")
  end
  io.write(string.format("messages %d in %d us\n", total, summary.duration))
  if bad > 0 then io.write(string.format("refused %d\n", bad)) end
end
