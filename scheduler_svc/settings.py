"""Settings of the scheduler."""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policies import PolicySettings
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.engine import EngineSettings
from scheduler_svc.live_requests import Graces
from scheduler_svc.policy_registry import find_policy
from svc_common.settings import ServiceSettings


class SchedulerSettings(ServiceSettings):
    """What the scheduler is told."""

    model_config = SettingsConfigDict(cli_prog_name="python -m scheduler_svc")

    scheduler_port: int = Field(50052, ge=0, le=65535, description="port for gateways; 0 takes a free one")
    scheduler_metrics_port: int = Field(9101, ge=0, le=65535, description="port for Prometheus")
    scheduler_admin_port: int = Field(50062, ge=0, le=65535, description="port for `quire explain`; 0 takes a free one")
    scheduler_admin_host: str = Field(
        "127.0.0.1", description="address of that port, which tells of every tenant's requests and asks for no key"
    )
    workers_at: str = Field(
        "127.0.0.1:50053",
        pattern=r"^\s*[^\s,]+:\d+(\s*,\s*[^\s,]+:\d+)*\s*$",
        description="workers as host:port, separated by commas; a name may stand for many",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", pattern="^(redis|rediss|unix)://", description="where requests are recorded"
    )
    standby: CliImplicitFlag[bool] = Field(
        False, description="leave a lead that is vacant to others for the time of one lease"
    )
    lease_seconds: float = Field(
        2.0, ge=0.5, le=60, description="seconds for which the leader keeps the lead without a word from it"
    )
    without_store: Literal["accept", "refuse"] = Field(
        "accept", description="what becomes of new requests while they cannot be recorded"
    )
    worker_patience: float = Field(
        60, ge=0, allow_inf_nan=False, description="seconds for which requests are taken once no worker is left"
    )
    max_step_tokens: int | None = Field(None, ge=1, description="most tokens that one step computes; else the worker's")
    max_sequences: int | None = Field(
        None, ge=1, description="most sequences that run at once on a worker; else as many as it holds"
    )
    policy: str = Field(
        "fair",
        description="who goes first: fair (shares by the token), priority, fcfs, or the name of an entry point of "
        "quire.policies in an installed package",
    )
    ageing_seconds: float = Field(
        10, gt=0, allow_inf_nan=False, description="seconds of waiting that make up for one class of priority"
    )
    deadline_horizon: float = Field(
        60,
        ge=0,
        allow_inf_nan=False,
        description="a request without a deadline counts among its tenant's as due so many seconds on",
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="how sequences that gave way come back; auto: by whichever costs less, as measured"
    )
    max_queued_requests: int = Field(16384, ge=1, description="most requests that wait")
    max_queued_tokens: int | None = Field(None, ge=1, description="most tokens, of prompts and max_tokens, that wait")
    max_tenant_queued_requests: int | None = Field(None, ge=1, description="most requests of one tenant that wait")
    max_tenant_queued_tokens: int | None = Field(None, ge=1, description="most tokens of one tenant that wait")
    gap_factor: float = Field(
        1.5,
        gt=1,
        allow_inf_nan=False,
        description="how much longer than by themselves streams may wait for a token beside a long prompt",
    )
    detach_grace: float = Field(
        30, ge=0, allow_inf_nan=False, description="seconds that a named request runs on without a client"
    )
    record_ttl: int = Field(3600, ge=60, description="seconds that a request's record is kept after its end")

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        find_policy(name)  # raises UnknownPolicy
        return name

    @property
    def worker_addresses(self) -> list[str]:
        """`workers_at`, one by one."""
        return [address.strip() for address in self.workers_at.split(",") if address.strip()]

    @property
    def engine(self) -> EngineSettings:
        """What the engine is told."""
        return EngineSettings(Graces(self.detach_grace), self.worker_patience, self.without_store == "refuse")

    @property
    def limits(self) -> SchedulerLimits:
        """What the core is told."""
        unbounded = SchedulerLimits()
        return SchedulerLimits(
            max_step_tokens=self.max_step_tokens or unbounded.max_step_tokens,
            max_sequences=self.max_sequences or unbounded.max_sequences,
            queue=AdmissionLimits(
                self.max_queued_requests,
                self.max_queued_tokens or unbounded.queue.max_tokens,
                self.max_tenant_queued_requests or unbounded.queue.max_tenant_requests,
                self.max_tenant_queued_tokens or unbounded.queue.max_tenant_tokens,
            ),
            policy=self.policy,
            make_policy=find_policy(self.policy),
            policy_settings=PolicySettings(self.ageing_seconds, self.deadline_horizon),
            gap_factor=self.gap_factor,
            preemption=PreemptionMode(self.preemption),
        )
