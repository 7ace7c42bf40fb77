-- Microseconds; wrk itself always sleeps for the whole duration, so scripts that end early keep their own time.
local ffi = require("ffi")
ffi.cdef [[ typedef struct { long sec; long usec; } moment; int gettimeofday(moment *at, void *zone); ]]
local at = ffi.new("moment")

return function()
  ffi.C.gettimeofday(at, nil)
  return tonumber(at.sec) * 1e6 + tonumber(at.usec)
end
