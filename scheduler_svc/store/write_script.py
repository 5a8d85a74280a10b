"""The part of the Lua script that writes tokens, log-probabilities and ends of records."""

WRITES = """
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
    -- How much there is, where that is less than the write needs: -1 without a record of the submission. Another one's
    -- may be older than this one's, which the store has lost.
    local function write()
      local there = call('HMGET', name, 'submission_id', 'count', 'num_tokens:' .. index, 'num_logprobs:' .. index,
        'state')
      local have, have_prompt = -1, 0
      if there[1] == submission then
        have = call('STRLEN', name .. ':tokens:' .. index) / token_size
        if has_logprobs then have = math.min(have, call('LLEN', name .. ':logprobs:' .. index)) end
        if prompt_offset > 0 then have_prompt = call('LLEN', name .. ':prompt_logprobs') end
      end
      if is_taken[key .. submission] then return nil end
      if offset > have or prompt_offset > have_prompt then return have end
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

-- `refused`: for how many seconds the submission is not recorded, where it was withdrawn.
local function finish(key, submission, state, ended_at, failure, ttl, refused)
  local name = PREFIX .. key
  if tonumber(refused) > 0 then call('SET', DELETED .. submission, '', 'EX', refused) end
  local there = fields_of(name, 'submission_id', 'count')
  if there[1] ~= submission then return end
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
"""
