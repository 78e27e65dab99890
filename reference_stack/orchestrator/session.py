"""How old is a conversation? Redis remembers when each was first seen, until it has been quiet for a while."""

from reference_stack.orchestrator.store import Store

FORGOTTEN_AFTER_S = 1800

_AGE = """
local first = redis.call('GET', KEYS[1])
if not first then first = ARGV[1] end
redis.call('SET', KEYS[1], first, 'EX', ARGV[2])
return tostring(tonumber(ARGV[1]) - tonumber(first))
"""


async def age_s(store: Store, user: str, session: str) -> float:
    """Seconds since this session of `user` was first seen; 0.0 for a new one. StoreDownError."""
    return max(0.0, float(await store.run(_AGE, [f"session:{user}:{session}"], FORGOTTEN_AFTER_S)))
