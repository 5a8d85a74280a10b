"""What a simulation writes down of each request and each tenant while it runs."""

from dataclasses import dataclass

from benchmarks.simulator.arrivals import Arrival
from benchmarks.simulator.prompts import Script


@dataclass(slots=True)
class TenantUsage:
    """What a tenant was served, in tokens. A prompt counts once, at its first output token, found in a cache or not."""

    num_prompt: int = 0
    num_generated: int = 0

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return self.num_prompt + self.num_generated


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request's times, in seconds; those that did not come are None. It goes with the request through the core."""

    number: int
    arrival: Arrival
    script: Script
    num_prompt: int
    tenant_usage: TenantUsage
    num_generated: int = 0
    admitted_at: float | None = None
    admission: int | None = None  # how many were admitted before it
    first_token_at: float | None = None
    ended_at: float | None = None
    failure: str | None = None  # why it ended without all its tokens, by the core's name
    retry_after: float | None = None
