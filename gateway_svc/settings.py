"""Settings of the gateway."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from svc_common.settings import ServiceSettings


class BadSetting(Exception):  # noqa: N818
    """A setting whose value cannot be used. The text is for the operator, and names the variable."""


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
    revision: str | None = Field(None, description="branch, tag or commit of the model's hub id; absent: main")
    tokenizer: str | None = Field(
        None, description="directory or hub id of another tokenizer than the model's own, the same for all roles"
    )
    tokenizer_revision: str | None = Field(
        None,
        description="branch, tag or commit of the tokenizer's hub id; absent: main, or the model's revision where the "
        "tokenizer is the model's",
    )
    chat_template: str | None = Field(
        None, description="file of a Jinja chat template, or the template itself, in place of the model's own"
    )
    generation_config: str = Field(
        "quire",
        min_length=1,
        description="where sampling values come from that a request leaves out: quire (Quire's own defaults), model "
        "(the model's generation_config.json), auto (the same, if there is one), or a directory with such a file",
    )
    override_generation_config: str | None = Field(
        None,
        description="JSON object of sampling values for requests that leave them out, before those of "
        "generation_config: temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens; null is Quire's own",
    )
    api_keys: Path | None = Field(None, description="TOML file of API keys; absent: everyone may call")
    drain_grace: float = Field(30.0, ge=0, description="seconds that running requests have to end after SIGTERM")

    @property
    def scheduler_addresses(self) -> list[str]:
        """`schedulers_at`, one by one."""
        return [address.strip() for address in self.schedulers_at.split(",")]
