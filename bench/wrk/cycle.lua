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

function response(status, headers, body)
  if string.sub(body, 1, 1) == "[" then
    local _, count = string.gsub(body, '"success":true', "")
    messages = messages + count
    return
  end
  if status ~= 200 then refused = refused + 1 return end
  local acks = {}
  for tx, part, lease in string.gmatch(body,
    '"transactionId":"([^"]+)".-"partitionId":"([^"]+)","leaseId":"([^"]+)"') do
    acks[#acks + 1] = '{"transactionId":"' .. tx .. '","partitionId":"' .. part .. '","leaseId":"' .. lease .. '"}'
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
