"""Records of a request and a tenant."""

from dataclasses import dataclass

from benchmarks.simulator.arrivals import Arrival
from benchmarks.simulator.prompts import Script


@dataclass(slots=True)
class TenantUsage:
    """Tokens served to a tenant. A prompt counts once, at its first output token, cached or not."""

    num_prompt: int = 0
    num_generated: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_generated


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request's times, in seconds; None where they did not come. It goes with the request through the core."""

    number: int
    arrival: Arrival
    script: Script
    num_prompt: int
    tenant_usage: TenantUsage
    prompt_seconds: float = 0.0  # that the core predicts for its prompt alone
    num_generated: int = 0
    num_ended: int = 0  # sequences
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    failure: str | None = None  # the core's reason, where it ended without all its tokens
    retry_after: float | None = None
