"""The Lua script that runs in Redis. It is one script, so that a call that finds it missing shows a restarted server.

Its first argument is the function's name. Its keys are those of `StoreKeys`; keys of records are made here. The script
needs Redis 6.2.
"""

from typing import NamedTuple

from scheduler_svc.store.bucket_script import BUCKETS
from scheduler_svc.store.write_script import WRITES
from svc_common.epochs import EPOCH_AHEAD, EPOCH_LIMIT

STALE = "QUIRESTALE"
OUTSIDE_WINDOW = "QUIREEPOCH"
DELETED = "QUIREDELETED"

PAGE_BYTES = 1 << 20
"""Of a record in one answer, about: Redis executes no other command meanwhile, and the answer must arrive within the
timeout.
"""


class StoreKeys(NamedTuple):
    """The keys of a deployment. All have its prefix as their hash tag, and so are in one shard."""

    epoch: str
    lease: str
    live: str
    """The set of the keys of live requests."""
    records: str
    """What keys of records begin with."""
    buckets: str
    """What keys of buckets begin with."""
    deleted: str
    """What keys begin with that say which submissions were deleted or withdrawn a short time ago, and which calls have
    deleted one.
    """

    @classmethod
    def of(cls, prefix: str) -> "StoreKeys":
        return cls(*(f"{{{prefix}}}:{name}" for name in ("epoch", "lease", "live", "request:", "bucket:", "deleted:")))


SCRIPT = """
local EPOCH, LEASE, LIVE, PREFIX, BUCKETS, DELETED = unpack(KEYS)
local LIMIT, AHEAD, PAGE = __LIMIT__, __AHEAD__, __PAGE__
local call = redis.call
local ops = {}

-- What others have written to a record costs this record, and no call: most errors here end a script.
local pcall_redis, MAX_SEQUENCES = redis.pcall, 65535

-- The values of fields of a record: none where there is something else than a record.
local function fields_of(name, ...)
  return pcall_redis('HMGET', name, ...)
end

local function count_of(field)
  return math.min(tonumber(field or '0') or 0, MAX_SEQUENCES)
end

-- Epochs are microseconds since 1970, which a double holds exactly below 2^53.
local function last_epoch()
  return tonumber(call('HGET', EPOCH, 'epoch') or '0')
end

-- The holder: empty where it is not known.
local function set_epoch(epoch, holder, ttl)
  call('HSET', EPOCH, 'epoch', epoch, 'holder', holder, 'write', '0')
  call('EXPIRE', EPOCH, ttl)
end

local function is_stale(epoch, ttl)
  local last = last_epoch()
  if last > tonumber(epoch) then return true end
  if tonumber(epoch) > last then set_epoch(epoch, '', ttl) end
  return false
end

local function each_sequence(name, count, visit)
  for index = 0, count_of(count) - 1 do
    visit(name .. ':tokens:' .. index, name .. ':logprobs:' .. index)
  end
end

local function remove(name, count)
  each_sequence(name, count, function(tokens, logprobs) call('DEL', tokens, logprobs) end)
  call('DEL', name, name .. ':prompt_logprobs')
end

local function record(key, submission, submit, accepted_at, deadline, count, fingerprint, version, key_id, ttl)
  local name = PREFIX .. key
  -- A Redis that is full refuses this command. It checks its memory before the first write of a script only, and never
  -- refuses a DEL.
  call('SADD', LIVE, key)
  call('EXPIRE', LIVE, ttl)
  remove(name, math.max(count_of(fields_of(name, 'count')[1]), tonumber(count)))
  call('HSET', name, 'submission_id', submission, 'submit', submit, 'state', 'accepted', 'accepted_at', accepted_at,
    'count', count, 'version', version)
  if deadline ~= '' then call('HSET', name, 'deadline', deadline) end
  if fingerprint ~= '' then call('HSET', name, 'fingerprint', fingerprint) end
  if key_id ~= '' then call('HSET', name, 'key_id', key_id) end
  call('EXPIRE', name, ttl)
end

-- A record has parts: part 0 is the log-probabilities of its prompt, part 2i + 1 the tokens of sequence i, and part
-- 2i + 2 its log-probabilities.
local function key_of_part(name, part)
  if part == 0 then return name .. ':prompt_logprobs' end
  return name .. (part % 2 == 1 and ':tokens:' or ':logprobs:') .. math.floor((part - 1) / 2)
end

-- Bytes of a part from `first` on, the `first` of what follows them, and whether nothing does. It is a byte of tokens,
-- of which there are `limit` at most, or an item of a list. Each of these follows its length: a client takes long to
-- read an answer of many items.
local function read_part(name, part, first, limit)
  local from, num_items = key_of_part(name, part), 64
  if part % 2 == 1 then
    local tokens = call('GETRANGE', from, first, first + limit - 1)
    return tokens, first + #tokens, #tokens < limit
  end
  local items = call('LRANGE', from, first, first + num_items - 1)
  for number, one in ipairs(items) do items[number] = struct.pack('<I4', #one) .. one end
  return table.concat(items), first + #items, #items < num_items
end

local function read_page(key, part, first)
  local name, parts, left, fields = PREFIX .. key, {}, PAGE, {}
  local is_first, last = part == 0 and first == 0, 2 * count_of(call('HGET', name, 'count'))
  while part <= last and left > 0 do
    local packed, next_one, is_whole = read_part(name, part, first, left)
    table.insert(parts, part)
    table.insert(parts, packed)
    left = left - #packed
    if is_whole then part, first = part + 1, 0 else first = next_one end
  end
  local size, is_last = PAGE - left, part > last
  if is_first or is_last then fields = call('HGETALL', name) end
  if is_first and #fields == 0 then return false, 0 end
  for _, one in ipairs(fields) do size = size + #one end
  return {fields, key, parts, is_last and -1 or part, first}, size
end

-- A page of a record, from `first` of a part on, and about how many bytes it has. The page has the record's fields, if
-- it is the first or the last one, the record's key, numbers of parts with bytes of them, and where the next page
-- begins: at part -1 if it is the last one, and -2 where the record cannot be read.
local function read(key, part, first)
  local is_read, found, size = pcall(read_page, key, part, first)
  if is_read then return found, size end
  return {{}, key, {}, -2, 0}, 0
end

local function has_gone_on(name, count)
  local found = call('EXISTS', name .. ':prompt_logprobs') == 1
  each_sequence(name, count, function(tokens) found = found or call('EXISTS', tokens) == 1 end)
  return found
end

function ops.put(_, epoch, epoch_ttl, ttl, key, submission, submit, accepted_at, deadline, count, fingerprint, version,
    key_id)
  if is_stale(epoch, epoch_ttl) then return redis.error_reply('QUIRESTALE') end
  if call('EXISTS', DELETED .. submission) == 1 then return redis.error_reply('QUIREDELETED') end
  local name = PREFIX .. key
  local there = fields_of(name, 'submission_id', 'state', 'count', 'key_id')
  local is_live = there[2] == 'accepted'
  if is_live and there[1] == submission and not has_gone_on(name, there[3]) then
    if (there[4] or '') == key_id then return false end  -- else its key is missing here: what follows would not fit
  elseif is_live or there[2] == 'finished' then
    return (read(key, 0, 0))
  end
  record(key, submission, submit, accepted_at, deadline, count, fingerprint, version, key_id, ttl)
  return false
end

function ops.read(_, key, part, first)
  return (read(key, tonumber(part), tonumber(first)))
end

-- A gateway that has not been sent the end of the request submits it again to the next scheduler: `kept` is for how
-- many seconds that is refused. A call with the same `call_id`, whose connection broke, may have removed the record
-- before. A Redis that is full does not refuse a SET, since it follows a DEL.
function ops.delete(_, epoch, epoch_ttl, key, kept, call_id)
  if is_stale(epoch, epoch_ttl) then return redis.error_reply('QUIRESTALE') end
  local name = PREFIX .. key
  if call('EXISTS', DELETED .. call_id) == 1 then return 1 end
  if call('EXISTS', name) == 0 then return 0 end
  local there = fields_of(name, 'count', 'submission_id')
  remove(name, there[1])
  call('SREM', LIVE, key)
  call('SET', DELETED .. call_id, '', 'EX', kept)
  if there[2] then call('SET', DELETED .. there[2], '', 'EX', kept) end
  return 1
end

-- Reads the first pages of the records of the first of these keys, until they have `limit` bytes; returns how many keys
-- these are, too.
-- Keys whose request has ended, or whose record has expired, leave the set of live ones.
function ops.read_live(_, limit, ...)
  local found, left, num_read = {}, tonumber(limit), 0
  for _, key in ipairs({...}) do
    if left <= 0 then break end
    if fields_of(PREFIX .. key, 'state')[1] == 'accepted' then
      local one, size = read(key, 0, 0)
      table.insert(found, one)
      left = left - size
    else
      call('SREM', LIVE, key)
    end
    num_read = num_read + 1
  end
  return {num_read, found}
end

function ops.renew(_, epoch, epoch_ttl, ttl, ...)
  if is_stale(epoch, epoch_ttl) then return redis.error_reply('QUIRESTALE') end
  for _, key in ipairs({...}) do
    local name = PREFIX .. key
    local count = fields_of(name, 'count')[1]
    if count then
      call('EXPIRE', name, ttl)
      call('EXPIRE', name .. ':prompt_logprobs', ttl)
      each_sequence(name, count, function(tokens, logprobs)
        call('EXPIRE', tokens, ttl)
        call('EXPIRE', logprobs, ttl)
      end)
    end
  end
  call('EXPIRE', LIVE, ttl)
  return 0
end

__WRITES__
-- Whether a submission that ran while the store was away replaces a record: not one that has finished, or is live and
-- has tokens, since clients may resume it. Otherwise the one that was accepted later has the key. Only a call with the
-- submission's record decides this.
local function may_be_replaced(name, newer, state, accepted_at, count)
  if state == 'finished' or (state == 'accepted' and has_gone_on(name, count)) then return false end
  return (tonumber(accepted_at or '0') or 0) <= tonumber(newer)
end

__BUCKETS__
-- A call that timed out may arrive after the one that repeated it, and is then ignored.
function ops.write(_, epoch, epoch_ttl, ttl, number, num_records, blob, spending, ...)
  if is_stale(epoch, epoch_ttl) then return redis.error_reply('QUIRESTALE') end
  if tonumber(number) < tonumber(call('HGET', EPOCH, 'write') or '0') then return redis.error_reply('QUIRELATE') end
  call('HSET', EPOCH, 'write', number)
  local rest, at, taken, is_taken = {...}, 1, {}, {}
  for _ = 1, tonumber(num_records) do
    local key, submission, submit, accepted_at, deadline, count, fingerprint, version, key_id = unpack(rest, at, at + 8)
    at = at + 9
    local there = fields_of(PREFIX .. key, 'submission_id', 'state', 'accepted_at', 'count', 'key_id')
    local is_own, has_key = there[1] == submission, (there[5] or '') == key_id
    if not there[1] or (is_own and not has_key) or
        (not is_own and may_be_replaced(PREFIX .. key, accepted_at, there[2], there[3], there[4])) then
      record(key, submission, submit, accepted_at, deadline, count, fingerprint, version, key_id, ttl)
    elseif not is_own then
      is_taken[key .. submission] = true
      table.insert(taken, key)
      table.insert(taken, submission)
    end
  end
  if spending ~= '' then note_spending(cjson.decode(spending)) end
  local gaps, gapped = writes(blob, ttl, is_taken)
  while at <= #rest do
    local key, submission, state, ended_at, failure, kept, refused = unpack(rest, at, at + 6)
    at = at + 7
    if not gapped[key] then finish(key, submission, state, ended_at, failure, kept, refused) end
  end
  return {gaps, taken}
end

-- Only where a lease could be renewed: the command changes nothing, and is refused where writes are.
function ops.leader(_)
  call('SETRANGE', LEASE, 0, '')
  return call('GET', LEASE)
end

-- `clock` is the scheduler's, in microseconds since 1970. A stored epoch outside the window of both clocks is replaced,
-- and none above such a one is begun.
function ops.take_lease(_, holder, milliseconds, above, epoch, epoch_ttl, clock)
  local held_by = call('GET', LEASE)
  if held_by and held_by ~= holder then return false end
  local time = call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local limit = math.min(math.max(now, tonumber(clock)) + AHEAD, LIMIT - 1)
  local last = last_epoch()
  if last >= limit then last = 0 end
  if tonumber(above) >= limit then return redis.error_reply('QUIREEPOCH') end
  -- A later epoch of this holder is of a call that it repeats because the answer was lost.
  if epoch ~= '' and last > tonumber(epoch) and call('HGET', EPOCH, 'holder') ~= holder then return false end
  local new = math.max(last + 1, tonumber(above) + 1, now)
  local text = string.format('%.0f', new)
  set_epoch(text, holder, epoch_ttl)
  call('SET', LEASE, holder, 'PX', milliseconds)
  return text
end

function ops.keep_lease(_, holder, milliseconds, epoch, epoch_ttl)
  local held_by = call('GET', LEASE)
  if (held_by and held_by ~= holder) or is_stale(epoch, epoch_ttl) then return 0 end
  call('SET', LEASE, holder, 'PX', milliseconds)
  call('EXPIRE', EPOCH, epoch_ttl)
  return 1
end

function ops.release_lease(_, holder)
  if call('GET', LEASE) == holder then call('DEL', LEASE) end
  return 0
end

return ops[ARGV[1]](unpack(ARGV))
"""
_PARTS = {
    "LIMIT": str(EPOCH_LIMIT),
    "AHEAD": str(EPOCH_AHEAD),
    "PAGE": str(PAGE_BYTES),
    "BUCKETS": BUCKETS,
    "WRITES": WRITES,
}
for _name, _text in _PARTS.items():
    SCRIPT = SCRIPT.replace(f"__{_name}__", _text)
