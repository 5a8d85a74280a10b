"""The part of the Lua script for buckets of tokens and requests, from which the leader takes leases for accounts."""

BUCKETS = """
-- A bucket has its `level` as of `at`, in microseconds of Redis' clock. `term` and `number` are of the last call, and
-- `taken` is what it took. The account has spent `spent` tokens, of which `term_spent` in the term `spent_in`.
local function note_spent(name, term, spent)
  local there = call('HMGET', name, 'spent_in', 'term_spent', 'spent')
  local before = there[1] == term and tonumber(there[2]) or 0
  if tonumber(spent) > before then
    call('HSET', name, 'spent_in', term, 'term_spent', string.format('%.0f', spent),
      'spent', string.format('%.0f', tonumber(there[3] or '0') + spent - before))
  end
end

-- Only buckets that exist: they were created when the tokens were leased.
local function note_spending(noted)
  for _, one in ipairs(noted.spending) do
    local name = BUCKETS .. one[1]
    if call('EXISTS', name) == 1 then pcall(note_spent, name, one[2], one[3]) end
  end
  for _, one in ipairs(noted.charges) do
    local name = PREFIX .. one[1]
    if fields_of(name, 'submission_id')[1] == one[2] then call('HSET', name, 'prompt_cost', one[3]) end
  end
end

-- A call that is repeated is answered again; one that arrives after a later one of its term has no effect.
local function call_bucket(name, now, term, number, per_minute, most, least, returned, spent)
  local there = call('HMGET', name, 'level', 'at', 'term', 'number', 'taken')
  if there[3] == term and tonumber(there[4]) >= number then
    return there[4] == tostring(number) and tonumber(there[5]) or 0, 0
  end
  local rate = per_minute / 60000000
  local level = per_minute
  if there[1] then level = tonumber(there[1]) + math.max(0, now - tonumber(there[2])) * rate end
  level = math.min(math.max(per_minute, least), level + returned)
  local taken, missing = math.min(most, math.floor(level)), 0
  if taken < least then
    taken, missing = 0, math.ceil((least - level) / rate / 1000)
  end
  call('HSET', name, 'level', string.format('%.6f', level - taken), 'at', string.format('%.0f', now), 'term', term,
    'number', number, 'taken', taken)
  if spent > 0 then note_spent(name, term, spent) end
  return taken, missing
end

-- Eight arguments for each bucket. Returns for each how much was taken, and the milliseconds until it has enough.
function ops.call_buckets(_, ttl, ...)
  local rest, answers, time = {...}, {}, call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  for at = 1, #rest, 8 do
    local name, numbers = BUCKETS .. rest[at], {}
    for index = at + 2, at + 7 do table.insert(numbers, tonumber(rest[index])) end
    local is_done, taken, missing = pcall(call_bucket, name, now, rest[at + 1], unpack(numbers))
    if not is_done then  -- what is there is malformed; or Redis is full: then it refuses this SET, but no DEL
      call('SET', name, '')
      call('DEL', name)
      taken, missing = call_bucket(name, now, rest[at + 1], unpack(numbers))
    end
    call('EXPIRE', name, ttl)
    table.insert(answers, taken)
    table.insert(answers, missing)
  end
  return answers
end
"""
