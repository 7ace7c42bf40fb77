-- Pushes of `size` messages with ids of their own, spread over `lanes` partitions.
local path, queue, size, lanes, run
local n = 0
local pad = string.rep("x", 80)

function init(args)
  path, queue, size, lanes, run = args[1], args[2], tonumber(args[3]), tonumber(args[4]), args[5]
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
end

function request()
  local lane = math.floor(n / size) % lanes
  local items = {}
  for i = 1, size do
    n = n + 1
    items[i] = '{"queue":"' .. queue .. '","partition":"p' .. lane .. '","transactionId":"' .. run .. '-' .. n
      .. '","payload":{"n":' .. n .. ',"pad":"' .. pad .. '"}}'
  end
  return wrk.format(nil, path, nil, '{"items":[' .. table.concat(items, ",") .. ']}')
end
