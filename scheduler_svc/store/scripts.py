"""The Lua script that runs in Redis. It is one script, so that a call that finds it missing shows a restarted server.

Its first argument is the function's name. Its keys are those of `StoreKeys`; keys of records are made here. The script
needs Redis 6.2.
"""

from typing import NamedTuple

from scheduler_svc.store.bucket_script import BUCKETS
from svc_common.epochs import EPOCH_AHEAD, EPOCH_LIMIT

STALE = "QUIRESTALE"
OUTSIDE_WINDOW = "QUIREEPOCH"


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

    @classmethod
    def of(cls, prefix: str) -> "StoreKeys":
        return cls(*(f"{{{prefix}}}:{name}" for name in ("epoch", "lease", "live", "request:", "bucket:")))


SCRIPT = """
local EPOCH, LEASE, LIVE, PREFIX, BUCKETS = unpack(KEYS)
local LIMIT, AHEAD = __LIMIT__, __AHEAD__
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

-- The items of a list, each after its length: a client takes long to read an answer of many parts.
local function packed_list(name)
  local parts = call('LRANGE', name, 0, -1)
  for number, one in ipairs(parts) do parts[number] = struct.pack('<I4', #one) .. one end
  return table.concat(parts)
end

local function read_whole(key)
  local name = PREFIX .. key
  local fields = call('HGETALL', name)
  if #fields == 0 then return false, 0 end
  local all_tokens, all_logprobs, prompt = {}, {}, packed_list(name .. ':prompt_logprobs')
  each_sequence(name, call('HGET', name, 'count'), function(tokens, logprobs)
    table.insert(all_tokens, call('GET', tokens) or '')
    table.insert(all_logprobs, packed_list(logprobs))
  end)
  local size = #prompt
  for _, parts in ipairs({fields, all_tokens, all_logprobs}) do
    for _, one in ipairs(parts) do size = size + #one end
  end
  return {fields, all_tokens, all_logprobs, prompt, key}, size
end

-- A record, and about how many bytes it has. One that cannot be read has no fields.
local function read(key)
  local is_read, found, size = pcall(read_whole, key)
  if is_read then return found, size end
  return {{}, {}, {}, '', key}, 0
end

local function has_gone_on(name, count)
  local found = call('EXISTS', name .. ':prompt_logprobs') == 1
  each_sequence(name, count, function(tokens) found = found or call('EXISTS', tokens) == 1 end)
  return found
end

function ops.put(_, epoch, epoch_ttl, ttl, key, submission, submit, accepted_at, deadline, count, fingerprint, version,
    key_id)
  if is_stale(epoch, epoch_ttl) then return redis.error_reply('QUIRESTALE') end
  local name = PREFIX .. key
  local there = fields_of(name, 'submission_id', 'state', 'count', 'key_id')
  local is_live = there[2] == 'accepted'
  if is_live and there[1] == submission and not has_gone_on(name, there[3]) then
    if (there[4] or '') == key_id then return false end  -- else its key is missing here: what follows would not fit
  elseif is_live or there[2] == 'finished' then
    return (read(key))
  end
  record(key, submission, submit, accepted_at, deadline, count, fingerprint, version, key_id, ttl)
  return false
end

function ops.read(_, key)
  return (read(key))
end

function ops.delete(_, epoch, epoch_ttl, key)
  if is_stale(epoch, epoch_ttl) then return redis.error_reply('QUIRESTALE') end
  local name = PREFIX .. key
  if call('EXISTS', name) == 0 then return 0 end
  remove(name, fields_of(name, 'count')[1])
  call('SREM', LIVE, key)
  return 1
end

-- Reads the records of the first of these keys, until they have `limit` bytes; returns how many keys these are, too.
-- Keys whose request has ended, or whose record has expired, leave the set of live ones.
function ops.read_live(_, limit, ...)
  local found, left, num_read = {}, tonumber(limit), 0
  for _, key in ipairs({...}) do
    if left <= 0 then break end
    if fields_of(PREFIX .. key, 'state')[1] == 'accepted' then
      local one, size = read(key)
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

-- The tokens and log-probabilities of a write, whose offset is not beyond the stored ones. A token has `token_size`
-- bytes.
local function extend(name, index, offset, packed, token_size, logprobs, cuts, ttl)
  local tokens_key, logprobs_key = name .. ':tokens:' .. index, name .. ':logprobs:' .. index
  local size = offset * token_size + #packed
  if #packed > 0 then
    call('SETRANGE', tokens_key, offset * token_size, packed)
    if offset == 0 then call('EXPIRE', tokens_key, ttl) end
  end
  if cuts and call('STRLEN', tokens_key) > size then
    if size == 0 then
      call('DEL', tokens_key)
    else
      call('SET', tokens_key, call('GETRANGE', tokens_key, 0, size - 1), 'EX', ttl)
    end
  end
  if #logprobs > 0 or cuts then
    if offset == 0 then call('DEL', logprobs_key) else call('LTRIM', logprobs_key, 0, offset - 1) end
    for _, one in ipairs(logprobs) do call('RPUSH', logprobs_key, one) end
    if offset == 0 and #logprobs > 0 then call('EXPIRE', logprobs_key, ttl) end
  end
end

-- Counts of tokens and log-probabilities, which show whether a record has lost some, for example by eviction.
-- They are not lowered when lost ones are written again: gateways rely on as many.
local function note_counts(name, index, offset, num_new, logprobs, cuts, tokens_before, logprobs_before)
  tokens_before, logprobs_before = tonumber(tokens_before or '0'), tonumber(logprobs_before or '0')
  local num_tokens = offset + num_new
  local num_logprobs = #logprobs > 0 and offset + #logprobs or math.min(offset, logprobs_before)
  if not cuts then
    num_tokens, num_logprobs = math.max(num_tokens, tokens_before), math.max(num_logprobs, logprobs_before)
  end
  if num_tokens ~= tokens_before then call('HSET', name, 'num_tokens:' .. index, num_tokens) end
  if num_logprobs ~= logprobs_before then call('HSET', name, 'num_logprobs:' .. index, num_logprobs) end
end

-- The log-probabilities of the prompt of a write, whose offset is not beyond the stored ones. Those are kept.
local function extend_prompt(name, offset, logprobs, ttl)
  local key = name .. ':prompt_logprobs'
  local have = call('LLEN', key)
  for number = have - offset + 1, #logprobs do call('RPUSH', key, logprobs[number]) end
  if have == 0 then call('EXPIRE', key, ttl) end
  local before = tonumber(call('HGET', name, 'num_prompt_logprobs') or '0')
  if offset + #logprobs > before then call('HSET', name, 'num_prompt_logprobs', offset + #logprobs) end
end

-- The expiry of a record's keys, in seconds, above 0. A stop match may arrive after its request has ended: the record
-- then has the expiry of its retention, and its keys must not outlive it.
local function time_to_live(name, state, ttl)
  if state == 'accepted' then return ttl end
  return math.max(1, call('TTL', name))
end

-- Packed: fourteen numbers, then key, submission, tokens, score, fingerprint, end, and each of the log-probabilities
-- after its length: first those of the tokens, then those of the prompt.
local function writes(blob, ttl, is_taken)
  local gaps, gapped, write_index, at = {}, {}, 0, 1
  local function take(size)
    at = at + size
    return blob:sub(at - size, at - 1)
  end
  while at <= #blob do
    local cuts, token_size, key_size, submission_size, index, offset, size, num_logprobs, cached, score_size
    local fingerprint_size, end_size, prompt_offset, num_prompt
    cuts, token_size, key_size, submission_size, index, offset, size, num_logprobs, cached, score_size,
      fingerprint_size, end_size, prompt_offset, num_prompt, at = struct.unpack('<BBHHI4I4I4I4I4BBI4I4I4', blob, at)
    local key, submission, packed, score = take(key_size), take(submission_size), take(size), take(score_size)
    local fingerprint = take(fingerprint_size)
    local has_end = end_size ~= 4294967295
    local last = has_end and take(end_size)
    local function take_each(count)
      local found = {}
      for number = 1, count do
        local length
        length, at = struct.unpack('<I4', blob, at)
        found[number] = take(length)
      end
      return found
    end
    local has_logprobs = num_logprobs ~= 4294967295
    local logprobs, prompt = take_each(has_logprobs and num_logprobs or 0), take_each(num_prompt)
    local name = PREFIX .. key
    -- How much there is, where that is less than the write needs.
    local function write()
      local there = call('HMGET', name, 'submission_id', 'count', 'num_tokens:' .. index, 'num_logprobs:' .. index,
        'state')
      local have, have_prompt = -1, 0
      if there[1] == submission then
        have = call('STRLEN', name .. ':tokens:' .. index) / token_size
        if has_logprobs then have = math.min(have, call('LLEN', name .. ':logprobs:' .. index)) end
        if prompt_offset > 0 then have_prompt = call('LLEN', name .. ':prompt_logprobs') end
      end
      if is_taken(key, submission, there[1]) then return nil end
      if not there[1] or offset > have or prompt_offset > have_prompt then return have end
      local kept = time_to_live(name, there[5], ttl)
      extend(name, index, offset, packed, token_size, logprobs, cuts == 1, kept)
      note_counts(name, index, offset, #packed / token_size, logprobs, cuts == 1, there[3], there[4])
      if #prompt > 0 then extend_prompt(name, prompt_offset, prompt, kept) end
      if index >= tonumber(there[2]) then call('HSET', name, 'count', index + 1) end
      if cached ~= 4294967295 then call('HSET', name, 'cached:' .. index, cached) end
      if has_end then call('HSET', name, 'end:' .. index, last)
      elseif cuts == 1 then call('HDEL', name, 'end:' .. index, 'score:' .. index) end
      if fingerprint_size > 0 then call('HSET', name, 'fingerprint', fingerprint) end
      if score_size > 0 then call('HSET', name, 'score:' .. index, score) end
      return nil
    end
    local is_written, have = pcall(write)
    if not is_written then  -- what is there is malformed: the scheduler has all of it, and writes it anew
      remove(name, fields_of(name, 'count')[1])
      have = -1
    end
    if have then
      table.insert(gaps, write_index)
      table.insert(gaps, have)
      gapped[key] = true
    end
    write_index = write_index + 1
  end
  return gaps, gapped
end

local function finish(key, submission, state, ended_at, failure, ttl, is_taken)
  local name = PREFIX .. key
  local there = fields_of(name, 'submission_id', 'count')
  if is_taken(key, submission, there[1]) or not there[1] then return end
  call('HSET', name, 'state', state, 'ended_at', ended_at)
  if failure ~= '' then call('HSET', name, 'failure', failure) end
  call('EXPIRE', name, ttl)
  call('EXPIRE', name .. ':prompt_logprobs', ttl)
  call('SREM', LIVE, key)
  each_sequence(name, there[2], function(tokens, logprobs)
    -- A string that grew has spare capacity: it is stored without.
    local all = pcall_redis('GET', tokens)
    if type(all) == 'string' then call('SET', tokens, all, 'EX', ttl) end
    call('EXPIRE', logprobs, ttl)
  end)
end

-- Whether a submission that ran while the store was away replaces a record: not one that has finished, or is live and
-- has tokens, since clients may resume it. Otherwise the one that was accepted later has the key.
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
  local rest, at, taken, is_listed = {...}, 1, {}, {}
  local function is_taken(key, submission, by)
    if not by or by == submission then return false end
    if not is_listed[key .. submission] then
      is_listed[key .. submission] = true
      table.insert(taken, key)
      table.insert(taken, submission)
    end
    return true
  end
  for _ = 1, tonumber(num_records) do
    local key, submission, submit, accepted_at, deadline, count, fingerprint, version, key_id = unpack(rest, at, at + 8)
    at = at + 9
    local there = fields_of(PREFIX .. key, 'submission_id', 'state', 'accepted_at', 'count', 'key_id')
    local is_own, has_key = there[1] == submission, (there[5] or '') == key_id
    if not there[1] or (is_own and not has_key) or
        (not is_own and may_be_replaced(PREFIX .. key, accepted_at, there[2], there[3], there[4])) then
      record(key, submission, submit, accepted_at, deadline, count, fingerprint, version, key_id, ttl)
    else
      is_taken(key, submission, there[1])
    end
  end
  if spending ~= '' then note_spending(cjson.decode(spending)) end
  local gaps, gapped = writes(blob, ttl, is_taken)
  while at <= #rest do
    local key, submission, state, ended_at, failure, kept = unpack(rest, at, at + 5)
    at = at + 6
    if not gapped[key] then finish(key, submission, state, ended_at, failure, kept, is_taken) end
  end
  return {gaps, taken}
end

function ops.leader(_)
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
for _name, _text in {"LIMIT": str(EPOCH_LIMIT), "AHEAD": str(EPOCH_AHEAD), "BUCKETS": BUCKETS}.items():
    SCRIPT = SCRIPT.replace(f"__{_name}__", _text)
