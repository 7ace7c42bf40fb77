-- Sends the lines of a file as bodies, once each, and stops at the end.
local requests, now = {}, nil
local at = 0
first, last = 0, 0
local threads = {}

function setup(thread) table.insert(threads, thread) end

function init(args)
  now = dofile(args[2])
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
  for line in io.lines(args[3]) do requests[#requests + 1] = wrk.format(nil, args[1], nil, line) end
end

function request()
  if first == 0 then first = now() end
  at = at + 1
  if at > #requests then
    wrk.thread:stop()
    return requests[#requests]
  end
  last = now()
  return requests[at]
end

-- Each request follows an answer, but for the first of each connection: the last one tells the time of the answers.
function done(summary)
  local spent = 1
  for _, thread in ipairs(threads) do spent = math.max(spent, thread:get("last") - thread:get("first")) end
  io.write(string.format("requests %d in %d us\n", summary.requests, spent))
end
