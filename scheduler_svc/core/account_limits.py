"""Limits that the requests of an account share. An account is a tenant, or some of its API keys."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """An account and what it may use; None: no limit.

    `max_running` sequences hold a slot at the same time, `max_queued` requests wait, and running sequences hold
    `max_kv_blocks` blocks. A token of the prompt that came from the prefix cache counts as `cached_token_factor`
    tokens, 0 to 1. Each request carries the limits that its gateway read: those of the latest submission apply.
    """

    account: str = ""
    max_running: int | None = None
    max_queued: int | None = None
    max_kv_blocks: int | None = None
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    cached_token_factor: float = 1.0


NO_LIMITS = AccountLimits()
"""Of a request whose client did not authenticate with a key."""
