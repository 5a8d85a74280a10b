"""Records of a running simulation: tokens by tenant, memory and speed over time."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulator.driver import MemoryUsage, record_of
from benchmarks.simulator.request_record import RequestRecord, TenantUsage
from scheduler_svc.core.events import Event, FailedEvent, TokensEvent

_MAX_SAMPLES = 513  # odd: the first and the last stay when every other one is dropped


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at a time in seconds. `num_generated` counts from the start."""

    at: float
    memory: MemoryUsage
    num_waiting: int
    num_generated: int


@dataclass(slots=True)
class Timeline:
    """A bounded number of samples.

    At the bound, every other one is dropped, and the gap between later ones doubles.
    """

    gap: float  # seconds from one to the next
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) == _MAX_SAMPLES:
            self.samples = self.samples[::2]
            self.gap *= 2


class RunRecorder:
    """Records of all requests, and tokens served to each tenant."""

    def __init__(self, sample_seconds: float = 0.1) -> None:
        self.records: list[RequestRecord] = []
        self.usage_by_tenant: defaultdict[str, TenantUsage] = defaultdict(TenantUsage)
        self.timeline = Timeline(sample_seconds)
        self.num_generated = 0
        self.num_live = 0

    def on_arrival(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.num_live += 1

    def on_admission(self, records: Sequence[RequestRecord], now: float) -> None:
        """Records the admission of requests in a step that were in none before."""
        for record in records:
            if record.admitted_at is None:
                record.admitted_at = now

    def on_events(self, events: Sequence[Event], now: float) -> int:
        """Records the events of a step, and returns how many requests ended."""
        num_ended = 0
        for event in events:
            if isinstance(event, TokensEvent):
                record = record_of(event.sequence.request)
                num_tokens = len(event.token_ids)
                tenant_usage = record.tenant_usage
                if record.first_token_at is None:
                    record.first_token_at = now
                    tenant_usage.num_prompt += record.num_prompt
                record.num_generated += num_tokens
                tenant_usage.num_generated += num_tokens
                self.num_generated += num_tokens
                if event.end is None:
                    continue
                record.num_ended += 1
                if record.num_ended < record.arrival.n:
                    continue
            elif isinstance(event, FailedEvent):
                record = record_of(event.request)
                record.failure = event.reason.name
                record.retry_after = event.retry_after
            else:
                continue
            record.ended_at = now
            self.num_live -= 1
            num_ended += 1
        return num_ended
