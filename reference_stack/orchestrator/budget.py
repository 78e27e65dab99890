"""What may a key spend? Tokens per minute with a burst, and a hard stop per hour; prompt and answer both count.

Tokens are reserved before a request is sent on, as many as it could cost, and settled when it is known what it did. A
reservation that nobody settles stays spent: a crash never gives tokens away. Over the minute's budget a request is not
refused: it gets the cheaper model, whose tokens count for the hour alone.
"""

import enum
from dataclasses import dataclass

from reference_stack.orchestrator.config import Tier
from reference_stack.orchestrator.store import Store

HOUR_S = 3600
SLOT_S = 10  # the hour is counted in slots: a token counts for an hour and up to a slot more, never for less

# KEYS: when the minute's bucket will be full again (GCRA); tokens per slot of the hour.
# ARGV: now, tokens, tokens per second, burst in tokens, tokens per hour, seconds of an hour and of a slot.
_RESERVE = """
local now, tokens, rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local per_hour, hour, width = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local spent, oldest, slots = 0, math.huge, redis.call('HGETALL', KEYS[2])
for i = 1, #slots, 2 do
  local slot = tonumber(slots[i])
  if (slot + 1) * width <= now - hour then
    redis.call('HDEL', KEYS[2], slots[i])
  else
    spent = spent + slots[i + 1]
    if tonumber(slots[i + 1]) > 0 then oldest = math.min(oldest, slot) end
  end
end
if spent + tokens > per_hour then
  return {'stop', oldest == math.huge and tostring(hour) or tostring((oldest + 1) * width + hour - now)}
end
redis.call('HINCRBY', KEYS[2], math.floor(now / width), tokens)
redis.call('EXPIRE', KEYS[2], hour + width)
local full_at = math.max(now, tonumber(redis.call('GET', KEYS[1]) or 0)) + tokens / rate
if full_at - now > burst / rate + 1e-6 then return {'over', '0'} end
redis.call('SET', KEYS[1], string.format('%.6f', full_at), 'PX', math.ceil((full_at - now) * 1000))
return {'within', '0'}
"""

# KEYS as above. ARGV: now, tokens too many (or too few), tokens per second, when reserved, slot width, 1 if within.
_SETTLE = """
local now, change, rate = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local slot = math.floor(tonumber(ARGV[4]) / tonumber(ARGV[5]))
if redis.call('HEXISTS', KEYS[2], slot) == 1 then redis.call('HINCRBY', KEYS[2], slot, change) end
local full_at = redis.call('GET', KEYS[1])
if ARGV[6] == '1' and full_at then
  full_at = tonumber(full_at) + change / rate
  if full_at <= now then redis.call('DEL', KEYS[1])
  else redis.call('SET', KEYS[1], string.format('%.6f', full_at), 'PX', math.ceil((full_at - now) * 1000)) end
end
return '0'
"""


class Standing(enum.Enum):
    """How a key stands with its budget; UNKNOWN when there was nobody to ask."""

    WITHIN = "within"
    OVER = "over"
    STOP = "stop"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reservation:
    """Tokens set aside for one request; for STOP none are, and `wait_s` says when to ask again at the earliest."""

    standing: Standing
    key: str
    tokens: int
    at_s: float
    wait_s: float = 0.0


def _keys(key: str) -> list[str]:
    return [f"budget:{{{key}}}:minute", f"budget:{{{key}}}:hour"]  # one hash tag: both on one node of a cluster


async def reserve(store: Store, key: str, tier: Tier, tokens: int) -> Reservation:
    """Set `tokens` aside for a request of the key named `key`. StoreDownError."""
    at_s = store.clock()
    rate_per_s = tier.tokens_per_min / 60
    burst = tier.tokens_per_min * tier.burst_min
    values = (tokens, rate_per_s, burst, tier.tokens_per_h, HOUR_S, SLOT_S)
    standing, wait_s = await store.run(_RESERVE, _keys(key), *values)
    return Reservation(Standing(standing.decode()), key, tokens, at_s, float(wait_s))


async def settle(store: Store, reservation: Reservation, tier: Tier, used: int) -> None:
    """Put a reservation right when it is known that `used` tokens were. StoreDownError."""
    if reservation.standing not in (Standing.WITHIN, Standing.OVER) or used == reservation.tokens:
        return
    change = used - reservation.tokens
    within = int(reservation.standing is Standing.WITHIN)
    values = (change, tier.tokens_per_min / 60, repr(reservation.at_s), SLOT_S, within)
    await store.run(_SETTLE, _keys(reservation.key), *values)
