-- Sends the lines of a file as bodies, once each, and stops at the end.
local path, lines, at

function init(args)
  path = args[1]
  lines, at = {}, 0
  for line in io.lines(args[2]) do lines[#lines + 1] = line end
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
end

function request()
  at = at + 1
  if at > #lines then
    wrk.thread:stop()
    at = #lines
  end
  return wrk.format(nil, path, nil, lines[at])
end

function done(summary) io.write(string.format("requests %d in %d us\n", summary.requests, summary.duration)) end
