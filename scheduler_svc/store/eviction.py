"""Checks that Redis does not evict keys: an evicted record is a lost request."""

import asyncio
import logging

from scheduler_svc.metrics import EVICTION_POLICY
from scheduler_svc.store.base import Store, StoreUnavailable

log = logging.getLogger("quire.scheduler")

_INTERVAL = 60.0  # seconds between checks: an operator may change the policy, and a failover the server
_RETRY = 1.0  # seconds until a check that failed is repeated
_SAFE, _UNKNOWN = "noeviction", "unknown"
_ADVICE = "set Redis' maxmemory-policy to noeviction"


async def watch_eviction(store: Store) -> None:
    """Until cancelled, logs the store's eviction policy where it is not `noeviction`, and sets its metric."""
    try:
        await _watch(store)
    finally:
        EVICTION_POLICY.clear()  # the next leader has it: here it may be an old one


async def _watch(store: Store) -> None:
    last = ""
    while True:
        try:
            policy = await store.eviction_policy() or _UNKNOWN
        except StoreUnavailable:
            await asyncio.sleep(_RETRY)
            continue
        if policy != last:
            EVICTION_POLICY.clear()
            EVICTION_POLICY.labels(policy).set(1)
            if policy == _UNKNOWN:
                log.warning("Redis' eviction policy cannot be read, by INFO", extra={"advice": _ADVICE})
            elif policy != _SAFE:
                log.warning("Redis may evict records", extra={"policy": policy, "advice": _ADVICE})
            elif last:
                log.info("Redis does not evict records any more")
        last = policy
        await asyncio.sleep(_INTERVAL)
