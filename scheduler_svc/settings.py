"""Settings of the scheduler."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy import PolicySettings
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.engine import EngineSettings
from scheduler_svc.live_state import Graces
from scheduler_svc.policy_registry import find_policy
from scheduler_svc.store.encryption import NO_KEYS, RecordKeys
from svc_common.addresses import Addresses, Host, HostPort, split_addresses
from svc_common.records import RECORD_TTL, RECORD_TTL_SECONDS
from svc_common.redis_tls import RedisTlsFiles
from svc_common.redis_url import DEFAULT_PREFIX, PREFIX, RedisPrefix, RedisUrl
from svc_common.settings import InnerSettings, OptionalPath


class SchedulerSettings(InnerSettings):
    """Settings of a scheduler. Each is a flag and a variable: --policy and QUIRE_POLICY."""

    model_config = SettingsConfigDict(cli_prog_name="python -m scheduler_svc")

    scheduler_port: int = Field(50052, ge=0, le=65535, description="port for gateways; 0 takes a free one")
    scheduler_metrics_port: int = Field(9101, ge=0, le=65535, description="port of /metrics; 0 takes a free one")
    scheduler_admin_port: int = Field(50062, ge=0, le=65535, description="port for `quire explain`; 0 takes a free one")
    scheduler_admin_host: Host = Field(
        "127.0.0.1", description="address of the admin port, which answers about all tenants"
    )
    workers_at: Addresses = Field(
        "127.0.0.1:50053",
        description="workers as host:port, separated by commas; a DNS name may stand for several",
    )
    redis_url: RedisUrl = Field(
        RedisUrl("redis://127.0.0.1:6379/0"), description="Redis that keeps the lease and the records"
    )
    redis_ca_file: OptionalPath = Field(
        None, description="PEM file of CAs that may sign Redis' certificate, beside the system's"
    )
    redis_cert_file: OptionalPath = Field(
        None, description="PEM file of the certificate that Redis asks its clients for, with its chain"
    )
    redis_key_file: OptionalPath = Field(
        None, description="PEM file of that certificate's key; unset: it is in the file of the certificate"
    )
    redis_prefix: RedisPrefix = Field(DEFAULT_PREFIX, description=PREFIX)
    record_keys_file: OptionalPath = Field(
        None,
        description="TOML file of keys; records of requests in Redis are encrypted with the first one; unset: they are "
        "not encrypted",
    )
    standby: CliImplicitFlag[bool] = Field(
        False, description="start as a standby: take a free lease only after QUIRE_LEASE_SECONDS"
    )
    lease_seconds: float = Field(
        2.0, ge=0.5, le=60, description="seconds after which a leader that has not renewed its lease is replaced"
    )
    without_store: Literal["accept", "refuse"] = Field(
        "accept",
        description="new requests while Redis is away: accept them without a record, or refuse them. Those of a key "
        "with requests_per_minute are refused in any case",
    )
    worker_patience: float = Field(
        60,
        ge=0,
        allow_inf_nan=False,
        description="seconds for which requests are accepted after the last worker is gone",
    )
    max_step_tokens: int | None = Field(None, ge=1, description="tokens that one step may compute; unset: the worker's")
    max_sequences: int | None = Field(
        None, ge=1, description="sequences that may run at once on a worker; unset: the worker's"
    )
    policy: str = Field(
        "fair",
        description="scheduling policy: fair (shares by the token), priority, fcfs, or the name of an entry point "
        "quire.policies of an installed package",
    )
    ageing_seconds: float = Field(
        10, gt=0, allow_inf_nan=False, description="seconds of waiting that raise a request by one priority class"
    )
    deadline_horizon: float = Field(
        60,
        ge=0,
        allow_inf_nan=False,
        description="seconds after its first token is due at which a request without a deadline counts as due; of a "
        "tenant's requests the one that is due first goes first",
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="how preempted sequences come back; auto: by whichever is estimated to cost less"
    )
    max_queued_requests: int = Field(16384, ge=1, description="requests that may wait for one model")
    max_queued_tokens: int = Field(
        50_000_000, ge=1, description="tokens, of prompts and max_tokens, that may wait for one model"
    )
    max_tenant_queued_requests: int | None = Field(
        None, ge=1, description="requests of one tenant that may wait for one model; unset: no limit"
    )
    max_tenant_queued_tokens: int | None = Field(
        None, ge=1, description="tokens of one tenant that may wait for one model; unset: no limit"
    )
    gap_factor: float = Field(
        1.5,
        gt=1,
        allow_inf_nan=False,
        description="a step with a part of a long prompt takes about this many times as long as its decodes alone, "
        "unless the first token would be late",
    )
    detach_grace: float = Field(
        30, ge=0, allow_inf_nan=False, description="seconds that a named request runs on without a client"
    )
    record_ttl: int = Field(RECORD_TTL_SECONDS, ge=60, description=RECORD_TTL)

    @field_validator("record_keys_file")
    @classmethod
    def _check_record_keys(cls, path: Path | None) -> Path | None:
        if path is not None:
            RecordKeys.read(path)  # raises InvalidRecordKeys
        return path

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        find_policy(name)  # raises UnknownPolicy
        return name

    @model_validator(mode="after")
    def _check_redis_tls(self) -> Self:
        self.redis_tls.check(self.redis_url.target)
        return self

    @property
    def record_keys(self) -> RecordKeys:
        return NO_KEYS if self.record_keys_file is None else RecordKeys.read(self.record_keys_file)

    @property
    def redis_tls(self) -> RedisTlsFiles:
        return RedisTlsFiles(self.redis_ca_file, self.redis_cert_file, self.redis_key_file)

    @property
    def worker_addresses(self) -> list[HostPort]:
        return split_addresses(self.workers_at)

    @property
    def engine(self) -> EngineSettings:
        return EngineSettings(Graces(self.detach_grace), self.worker_patience, self.without_store == "refuse")

    @property
    def limits(self) -> SchedulerLimits:
        unbounded = SchedulerLimits()
        return SchedulerLimits(
            max_step_tokens=self.max_step_tokens or unbounded.max_step_tokens,
            max_sequences=self.max_sequences or unbounded.max_sequences,
            queue=AdmissionLimits(
                self.max_queued_requests,
                self.max_queued_tokens,
                self.max_tenant_queued_requests or unbounded.queue.max_tenant_requests,
                self.max_tenant_queued_tokens or unbounded.queue.max_tenant_tokens,
            ),
            policy=self.policy,
            make_policy=find_policy(self.policy),
            policy_settings=PolicySettings(self.ageing_seconds, self.deadline_horizon),
            gap_factor=self.gap_factor,
            preemption=PreemptionMode(self.preemption),
        )
