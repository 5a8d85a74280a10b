"""Settings of the gateway."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from svc_common.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """What the gateway is told."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gateway_svc")

    http_port: int = Field(8000, ge=0, le=65535, description="port for HTTP clients; 0 takes a free one")
    grpc_port: int = Field(50051, ge=0, le=65535, description="port for gRPC clients; 0 takes a free one")
    schedulers_at: str = Field(
        "127.0.0.1:50052",
        pattern=r"^\s*[^\s,]+:\d+\s*(,\s*[^\s,]+:\d+\s*)*$",
        description="schedulers as host:port, separated by commas; the first that answers is used",
    )
    scheduler_patience: float = Field(
        60.0, ge=0, description="seconds that running requests wait while no scheduler can be reached"
    )
    model: str | None = Field(None, description="model directory, GGUF file or hub id; absent: the default model")
    api_keys: Path | None = Field(None, description="TOML file of API keys; absent: everyone may call")
    drain_grace: float = Field(30.0, ge=0, description="seconds that running requests have to end after SIGTERM")

    @property
    def scheduler_addresses(self) -> list[str]:
        """`schedulers_at`, one by one."""
        return [address.strip() for address in self.schedulers_at.split(",")]
