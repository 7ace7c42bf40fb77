-- Sends the lines of a file as bodies, once each, and stops at the end.
local path, lines, now
local at = 0
answers, first, last = 0, 0, 0
local threads = {}

function setup(thread) table.insert(threads, thread) end

function init(args)
  path, lines = args[1], {}
  now = dofile(args[2])
  for line in io.lines(args[3]) do lines[#lines + 1] = line end
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
end

function request()
  if first == 0 then first = now() end
  at = at + 1
  if at > #lines then
    wrk.thread:stop()
    at = #lines
  end
  return wrk.format(nil, path, nil, lines[at])
end

function response() answers, last = answers + 1, now() end

function done(summary)
  local total, spent = 0, 1
  for _, thread in ipairs(threads) do
    total = total + thread:get("answers")
    spent = math.max(spent, thread:get("last") - thread:get("first"))
  end
  io.write(string.format("requests %d in %d us\n", total, spent))
end
