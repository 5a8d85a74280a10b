"""Settings of the scheduler."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from scheduler_svc.core.scheduler import Limits
from svc_common.settings import ServiceSettings


class SchedulerSettings(ServiceSettings):
    """What the scheduler is told."""

    model_config = SettingsConfigDict(cli_prog_name="python -m scheduler_svc")

    scheduler_port: int = Field(50052, ge=0, le=65535, description="port for gateways; 0 takes a free one")
    scheduler_metrics_port: int = Field(9101, ge=0, le=65535, description="port for Prometheus")
    workers_at: str = Field(
        "127.0.0.1:50053",
        pattern=r"^\s*[^\s,]+:\d+(\s*,\s*[^\s,]+:\d+)*\s*$",
        description="workers as host:port, separated by commas; a name may stand for many",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", pattern="^(redis|rediss|unix)://", description="where requests are recorded"
    )
    max_step_tokens: int | None = Field(None, ge=1, description="most tokens that one step computes; else the worker's")
    max_sequences: int | None = Field(
        None, ge=1, description="most sequences that run at once on a worker; else as many as it holds"
    )
    detach_grace: float = Field(30, ge=0, description="seconds that a named request runs on without a client")
    record_ttl: int = Field(3600, ge=60, description="seconds that a request's record is kept after its end")

    @property
    def worker_addresses(self) -> list[str]:
        """`workers_at`, one by one."""
        return [address.strip() for address in self.workers_at.split(",") if address.strip()]

    @property
    def limits(self) -> Limits:
        """The budgets that are set, beside those of workers."""
        budgets = {"max_step_tokens": self.max_step_tokens, "max_sequences": self.max_sequences}
        return Limits(**{name: value for name, value in budgets.items() if value is not None})
