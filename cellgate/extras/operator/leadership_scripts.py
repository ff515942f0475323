"""What Redis does for gates that agree on who leads: scripts, each on one key.

The key is a hash: `gate` leads until `until` (clock of Redis, in ms) with the fencing token `token`;
`of:NAME` is a document of the leader, `MILLISECONDS:TEXT`. A script is one step for all gates, so that of two
who write at the same time one is refused. docs/redis.md describes it.
"""

from __future__ import annotations

KEEP_MS = 24 * 3600 * 1000
"""How long a document is remembered."""
AHEAD_MS = 3600 * 1000
"""Clocks of a Redis and of its successor may differ by so much; what is later is nobody's."""
LEASE_TEXT = b'{"gate":"%b"}'
ERASED_TEXT = b'{"v":1}'

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local size = redis.pcall('HLEN', KEYS[1])
if type(size) == 'table' then
  if not string.find(size.err, 'WRONGTYPE') then return size end
  size = math.huge
end
if size > 4096 + 64 then redis.call('DEL', KEYS[1]) end
local had = redis.call('HMGET', KEYS[1], 'gate', 'token', 'until', 'lease')
local gate, token, ends = string.sub(had[1] or '', 1, 256), tonumber(had[2]) or 0, tonumber(had[3]) or 0
if not (token < now + 86400000) then token = 0 end
"""
# A key of another kind, or with more than gates write, is nobody's. So is a token far ahead of the clock.

# A token is never smaller than the clock, so that it grows even when Redis came back empty.
HOLD = (
    _NOW
    + """
local me, ttl, stands, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local lease = string.sub(had[4] or '', 1, 256)
local dropped = 9 + 2 * tonumber(ARGV[8])
local function at(written) return tonumber(string.match(written, '^(%d+):')) or 0 end
for i = 9, dropped - 1, 2 do
  local has = redis.call('HGET', KEYS[1], 'of:' .. ARGV[i])
  if has and redis.sha1hex(has) == ARGV[i + 1] then redis.call('HDEL', KEYS[1], 'of:' .. ARGV[i]) end
end
for i = dropped, #ARGV, 2 do
  local has = redis.call('HGET', KEYS[1], 'of:' .. ARGV[i])
  if not has or at(has) < at(ARGV[i + 1]) then redis.call('HSET', KEYS[1], 'of:' .. ARGV[i], ARGV[i + 1]) end
end
local is_mine, is_over = gate == me, gate == '' or ends <= now
local is_forged = gate ~= '' and gate == ARGV[6] and lease == ARGV[7]
if stands and (is_mine or is_over or is_forged) then
  if not is_mine or is_over then token = math.max(token + 1, now) end
  gate, ends, lease = me, now + ttl, ARGV[5]
elseif is_mine and not stands then
  ends = 0
elseif not (ends <= now + ttl) then
  ends = now + ttl
  redis.call('HSET', KEYS[1], 'until', string.format('%.0f', ends))
end
if gate == me then
  redis.call('HSET', KEYS[1], 'gate', gate, 'token', string.format('%.0f', token),
             'until', string.format('%.0f', ends), 'lease', lease)
end
redis.call('PEXPIRE', KEYS[1], keep)
local all, found, bytes = redis.call('HGETALL', KEYS[1]), {}, 0
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 3) == 'of:' then
    local written, size = at(all[i + 1]), #all[i + 1] + #all[i]
    if size > 1048576 or written + keep < now or not (written <= now + 3600000) then
      redis.call('HDEL', KEYS[1], all[i])
    elseif bytes + size <= 8388608 then
      bytes = bytes + size
      found[#found + 1] = string.sub(all[i], 4); found[#found + 1] = all[i + 1]
    end
  end
end
return {gate, token, math.max(0, ends - now), now, found, lease}
"""
)
"""ARGV: gate, lifetime in ms, whether it stands, KEEP_MS, its signed lease, who leads by which lease that is
not believed, how many documents are forged, their names and digests, then names and documents that are
missing or old. Returns who leads, its token, for how many ms more, Redis's clock, all documents, the lease.
A lease never ends later than in its lifetime, whatever somebody has written."""

WRITE = (
    _NOW
    + """
if gate ~= ARGV[1] or token ~= tonumber(ARGV[2]) or ends <= now then return {0, gate} end
local name = 'of:' .. ARGV[3]
local before = tonumber(string.match(redis.call('HGET', KEYS[1], name) or '', '^(%d+):')) or 0
local said = string.format('%.0f', math.max(now, before + 1)) .. ':' .. ARGV[4]
redis.call('HSET', KEYS[1], name, said)
return {1, said}
"""
)
"""ARGV: gate, its token, name, text. Returns 1 and the document as it is written, or 0 and who leads."""

ERASE = """
local name, written = 'of:' .. ARGV[1], ARGV[2]
if redis.call('HGET', KEYS[1], name) ~= written then return 0 end
local erased = string.format('%.0f', tonumber(string.match(written, '^(%d+):')) + 1) .. ':' .. ARGV[3]
redis.call('HSET', KEYS[1], name, erased)
return erased
"""
"""ARGV: name, the document as it was written, and one that says nothing. It becomes that, and newer, lest a
gate that has heard of it writes it again. Returns that, or 0: there is another one."""

FIRST = """
for _ = 1, 64 do
  local text = redis.pcall('LINDEX', KEYS[1], 0)
  if type(text) == 'table' then
    if not string.find(text.err, 'WRONGTYPE') then return text end
    redis.call('DEL', KEYS[1])
    return false
  end
  if not text or #text <= tonumber(ARGV[1]) then return text end
  redis.call('LTRIM', KEYS[1], 1, -1)
end
return false
"""
"""ARGV: how long a text may be. Returns the oldest of a list; longer ones before it are removed."""
