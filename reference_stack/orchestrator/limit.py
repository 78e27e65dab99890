"""How often may a user ask? At most so many requests in any minute, counted over all workers.

The moments of the passed requests are kept, so the count is exact in every window. What is refused is not counted: who
keeps asking is served again as soon as the window moves on.
"""

import secrets

from reference_stack.orchestrator.store import Store

WINDOW_S = 60

_TAKE = """
local key, now, window, limit = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', key, '-inf', now - window)
if redis.call('ZCARD', key) >= limit then
  local oldest = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  return tostring(oldest + window - now)
end
redis.call('ZADD', key, ARGV[1], ARGV[4])
redis.call('EXPIRE', key, window)
return '0'
"""


async def take(store: Store, user: str, per_min: int) -> float:
    """Count one request of `user`; 0.0 when it may pass, else the seconds after which one may. StoreDownError."""
    return float(await store.run(_TAKE, [f"requests:{user}"], WINDOW_S, per_min, secrets.token_hex(8)))
