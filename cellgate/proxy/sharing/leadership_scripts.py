"""What Redis does for gates that agree on who leads: three scripts, each on one key.

The key is a hash: `gate` leads until `until` (Redis's own clock, milliseconds) with the fencing token
`token`; `of:NAME` is a document of the leader, `MILLISECONDS:TEXT`. A script is one step for all gates, so
that of two who write at the same time one is refused. docs/redis.md describes it.
"""

from __future__ import annotations

KEEP_MS = 24 * 3600 * 1000
"""How long a document is remembered."""

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local had = redis.call('HMGET', KEYS[1], 'gate', 'token', 'until')
local gate, token, ends = had[1], tonumber(had[2]) or 0, tonumber(had[3]) or 0
"""

# A token is never smaller than the clock, so that it grows even when Redis came back empty.
HOLD = (
    _NOW
    + """
local me, ttl, stands, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local function at(written) return tonumber(string.match(written, '^(%d+):')) or 0 end
for i = 5, #ARGV, 2 do
  local has = redis.call('HGET', KEYS[1], 'of:' .. ARGV[i])
  if not has or at(has) < at(ARGV[i + 1]) then redis.call('HSET', KEYS[1], 'of:' .. ARGV[i], ARGV[i + 1]) end
end
if stands and (gate == me or ends <= now) then
  if gate ~= me or ends <= now then token = math.max(token + 1, now) end
  gate, ends = me, now + ttl
elseif gate == me and not stands then
  ends = 0
end
if gate == me then
  redis.call('HSET', KEYS[1], 'gate', gate, 'token', string.format('%.0f', token),
             'until', string.format('%.0f', ends))
end
redis.call('PEXPIRE', KEYS[1], keep)
local all, found = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 3) == 'of:' then
    if at(all[i + 1]) + keep < now then redis.call('HDEL', KEYS[1], all[i])
    else found[#found + 1] = string.sub(all[i], 4); found[#found + 1] = all[i + 1] end
  end
end
return {gate or '', token, math.max(0, ends - now), now, found}
"""
)
"""ARGV: gate, lifetime in ms, whether it stands, KEEP_MS, then names and documents that are missing or old.
Returns who leads, its token, for how many ms more, Redis's clock, and all documents."""

WRITE = (
    _NOW
    + """
if gate ~= ARGV[1] or token ~= tonumber(ARGV[2]) or ends <= now then return {0, gate or ''} end
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
local erased = string.format('%.0f', tonumber(string.match(written, '^(%d+):')) + 1) .. ':'
redis.call('HSET', KEYS[1], name, erased)
return erased
"""
"""ARGV: name, the document as it was written. It becomes an empty one that is newer, lest a gate that has
heard of it writes it again. Returns that, or 0: there is another one."""
