"""Settings of the supervisor: how many roles, and where they listen. What else is QUIRE_… goes to the roles."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from svc_common.settings import ServiceSettings


class SupervisorSettings(ServiceSettings):
    """What the supervisor is told. A port of 0 takes a free one; of several roles, the one at i takes its port + i."""

    model_config = SettingsConfigDict(cli_prog_name="python -m svc_common.supervisor")

    host: str = Field("127.0.0.1", description="address that gateways listen on; the rest stays on 127.0.0.1")
    log_level: str = Field("warning", pattern="^(debug|info|warning|error)$", description="least level that roles log")
    http_port: int = Field(8000, ge=0, le=65535, description="port of the first gateway for HTTP")
    grpc_port: int = Field(50051, ge=0, le=65535, description="port of the first gateway for gRPC")
    scheduler_port: int = Field(0, ge=0, le=65535, description="port of the first scheduler for gateways")
    scheduler_admin_port: int = Field(
        50062, ge=0, le=65535, description="port of the first scheduler for `quire explain`"
    )
    scheduler_metrics_port: int = Field(9101, ge=0, le=65535, description="port of the first scheduler for Prometheus")
    worker_port: int = Field(0, ge=0, le=65535, description="port of the first worker for the scheduler")
    worker_metrics_port: int = Field(9111, ge=0, le=65535, description="port of the first worker for Prometheus")
    gateways: int = Field(1, ge=1, le=64, description="how many gateways")
    schedulers: int = Field(1, ge=1, le=8, description="how many schedulers: one leads, the others stand by")
    workers: int = Field(1, ge=1, le=64, description="how many workers")
    redis_url: str | None = Field(None, description="a Redis that runs already; absent: one is started")
    model: str | None = Field(None, description="model directory, GGUF file or hub id; absent: the default model")
    revision: str | None = Field(None, description="branch, tag or commit of the model's hub id; absent: main")
    tokenizer: str | None = Field(
        None, description="directory or hub id of another tokenizer than the model's own, the same for all roles"
    )
    tokenizer_revision: str | None = Field(
        None,
        description="branch, tag or commit of the tokenizer's hub id; absent: main, or the model's revision where the "
        "tokenizer is the model's",
    )
    api_keys: Path | None = Field(None, description="file of the gateways' API keys; absent: none is asked for")
    run_dir: Path = Field(Path("run"), description="directory that the embedded Redis keeps its data in")
    state_file: Path | None = Field(None, description="file to keep the roles' process ids and addresses in, as JSON")
    stop_seconds: float = Field(45, gt=0, description="seconds that a role may take to end before it is killed")

    @property
    def model_environment(self) -> dict[str, str]:
        """Variables that name the model and its tokenizer, for roles and for what prepares the files."""
        named = {name: getattr(self, name) for name in ("model", "revision", "tokenizer", "tokenizer_revision")}
        return {f"QUIRE_{name.upper()}": value for name, value in named.items() if value is not None}
