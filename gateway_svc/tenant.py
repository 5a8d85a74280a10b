"""Who makes a call: a tenant, with the limits of the API key that it authenticated with."""

from collections.abc import Collection
from dataclasses import dataclass

from gateway_svc.retention import Retention
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from svc_common.keys import DEFAULT_TENANT_NAME


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """An account, and what its requests may use together; None: no limit.

    An account is a tenant's keys of one name, or those without a name. So a new key of the same name shares the limits
    of the key that it replaces. `AccountLimits` of the session stream has the meaning of each limit.
    """

    account: str
    max_running: int | None = None
    max_queued: int | None = None
    max_kv_blocks: int | None = None
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    cached_token_factor: float | None = None

    def to_proto(self) -> scheduler_v1.AccountLimits:
        return scheduler_v1.AccountLimits(
            account=self.account,
            max_running=self.max_running,
            max_queued=self.max_queued,
            max_kv_blocks=self.max_kv_blocks,
            tokens_per_minute=self.tokens_per_minute,
            requests_per_minute=self.requests_per_minute,
            cached_token_factor=self.cached_token_factor,
        )


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, its weight in the fair share of tokens, and what its key allows.

    `max_priority` is the highest priority of its requests, `models` has the names of the models that it may use,
    `retention` is how long the records of its requests are kept at most; None: any.
    """

    name: str
    weight: float = 1.0
    limits: AccountLimits | None = None
    max_priority: int | None = None
    models: frozenset[str] | None = None
    retention: Retention | None = None

    def may_use(self, names: Collection[str]) -> bool:
        """Whether it may use a model that has these names."""
        return self.models is None or not self.models.isdisjoint(names)


DEFAULT_TENANT = Tenant(DEFAULT_TENANT_NAME)
"""Every caller, where no API keys are required: it has no limits."""


def account_name(tenant: str, key_name: str = "") -> str:
    """The account of a tenant's keys of one name. `key_name` has no "/", so the name of an account is unambiguous."""
    return f"{tenant}/{key_name}"
