"""Settings of the supervisor. Roles inherit the environment, and with it all other QUIRE_ variables."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from svc_common.addresses import Host
from svc_common.model_settings import (
    MODELS,
    SERVED_MODEL_NAME,
    TASK,
    ChatRoles,
    ModelSettings,
    ModelsFile,
    ServedModelNames,
    TaskChoice,
    read_models_file,
)
from svc_common.models import split_names
from svc_common.redis_url import DEFAULT_PREFIX, PREFIX, RedisPrefix, RedisUrl
from svc_common.settings import EMPTY_IS_UNSET, INSECURE, OptionalPath, ServiceSettings

GATEWAY_SETTINGS = (
    "chat_template",
    "chat_template_kwargs",
    "chat_roles",
    "tool_format",
    "reasoning_format",
    "generation_config",
    "override_generation_config",
)
"""Settings of a model for its gateways."""

_RUN_DIR = Path("run")


class SupervisorSettings(ServiceSettings):
    """Settings of `make run`. A port of 0 takes a free one; process i of a role takes its port + i."""

    model_config = SettingsConfigDict(cli_prog_name="python -m svc_common.supervisor")

    host: Host = Field("127.0.0.1", description="address that gateways listen on; other services listen on 127.0.0.1")
    log_level: str = Field(
        "warning", pattern="^(debug|info|warning|error)$", description="lowest level that services log"
    )
    http_port: int = Field(8000, ge=0, le=65535, description="port of the first gateway for HTTP")
    grpc_port: int = Field(50051, ge=0, le=65535, description="port of the first gateway for gRPC")
    gateway_metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of the first gateway for Prometheus; unset: none"
    )
    scheduler_port: int = Field(0, ge=0, le=65535, description="port of the first scheduler for gateways")
    scheduler_admin_port: int = Field(
        50062, ge=0, le=65535, description="port of the first scheduler for `quire explain`"
    )
    scheduler_metrics_port: int = Field(9101, ge=0, le=65535, description="port of the first scheduler for Prometheus")
    worker_port: int = Field(0, ge=0, le=65535, description="port of the first worker for the scheduler")
    worker_metrics_port: int = Field(9111, ge=0, le=65535, description="port of the first worker for Prometheus")
    gateways: int = Field(1, ge=1, le=64, description="number of gateways")
    uds: OptionalPath = Field(
        None, description="path of a Unix socket for HTTP clients, in place of http_port; for one gateway"
    )
    schedulers: int = Field(1, ge=1, le=8, description="number of schedulers; one leads, the others are standbys")
    workers: int = Field(1, ge=1, le=64, description="number of workers")
    redis_url: Annotated[RedisUrl | None, EMPTY_IS_UNSET] = Field(
        None, description="URL of a running Redis; unset: one is started"
    )
    redis_prefix: RedisPrefix = Field(DEFAULT_PREFIX, description=PREFIX)
    model: str | None = Field(None, description="model directory, GGUF file or hub id; unset: SmolLM2-135M-Instruct")
    revision: str | None = Field(None, description="branch, tag or commit of the model's hub id; unset: main")
    tokenizer: str | None = Field(
        None,
        description="directory or hub id of a tokenizer that replaces the model's; the same for gateways and workers",
    )
    tokenizer_revision: str | None = Field(
        None,
        description="branch, tag or commit of the tokenizer's hub id; unset: main, or the model's revision if the "
        "tokenizer is the model's",
    )
    served_model_name: ServedModelNames | None = Field(None, description=SERVED_MODEL_NAME)
    chat_template: str | None = Field(None, description="passed on to gateways")
    chat_template_kwargs: str | None = Field(None, description="passed on to gateways")
    chat_roles: ChatRoles | None = Field(None, description="passed on to gateways")
    tool_format: str | None = Field(None, description="passed on to gateways")
    reasoning_format: str | None = Field(None, description="passed on to gateways")
    generation_config: str | None = Field(None, description="passed on to gateways")
    override_generation_config: str | None = Field(None, description="passed on to gateways")
    seed: int | None = Field(
        None, ge=0, le=2**32 - 1, description="passed on to gateways; gateway i has it plus i, and draws other seeds"
    )
    task: TaskChoice = Field("auto", description=TASK)
    models: ModelsFile = Field(None, description=MODELS)
    api_keys: Path | None = Field(
        None, description="TOML file of API keys, read again when it changes; unset: no key is required"
    )
    deployment_secret_file: OptionalPath = Field(
        None,
        description="file with the deployment's secret, at least 32 bytes; unset: deployment.secret in run_dir, made "
        "if it does not exist",
    )
    insecure: CliImplicitFlag[bool] = Field(False, description=INSECURE)
    tls_cert_file: OptionalPath = Field(None, description="passed on to gateways")
    tls_key_file: OptionalPath = Field(None, description="passed on to gateways")
    run_dir: Annotated[Path, BeforeValidator(lambda path: path or _RUN_DIR)] = Field(
        _RUN_DIR, description="directory for the embedded Redis' data and the deployment's secret"
    )
    state_file: OptionalPath = Field(None, description="JSON file for process ids and addresses of the services")
    stop_seconds: float = Field(45, gt=0, description="seconds that a service may take to end before it is killed")

    @field_validator("uds")
    @classmethod
    def _check_uds(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("gateways", 1) > 1:
            raise ValueError("is for one gateway, and QUIRE_GATEWAYS is more")
        return path

    @property
    def gateway_environment(self) -> dict[str, str]:
        """Variables of the settings that are passed on to gateways."""
        named = {name: getattr(self, name) for name in GATEWAY_SETTINGS}
        return {f"QUIRE_{name.upper()}": value for name, value in named.items() if value}

    def model_settings(self) -> list[ModelSettings]:
        """The settings of each served model. Raises InvalidModelsFile."""
        if self.models is not None:
            return read_models_file(self.models)
        return [
            ModelSettings(
                model=self.model,
                revision=self.revision,
                tokenizer=self.tokenizer,
                tokenizer_revision=self.tokenizer_revision,
                served_names=split_names(self.served_model_name or ""),
                task=self.task,
                workers=self.workers,
            )
        ]
