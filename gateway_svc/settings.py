"""Settings of the gateway."""

import json
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from gateway_svc.call_limits import BODY_BYTES, CALLS, SLOW_MESSAGES, CallLimits
from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.key_file import KeyFile
from gateway_svc.key_tables import InvalidKeyFile
from gateway_svc.message_formats.formats import (
    REASONING_FORMAT_NAMES,
    REASONING_FORMATS,
    TOOL_FORMAT_NAMES,
    TOOL_FORMATS,
)
from gateway_svc.retention import PATTERN, Retention, RetentionRules
from gateway_svc.sampling_fields import DEFAULT_MAX_LOGPROBS, HIGHEST_MAX_LOGPROBS
from gateway_svc.tenant_shares import TenantShares
from svc_common.addresses import Addresses, HostPort, split_addresses
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
    split_roles,
)
from svc_common.models import split_names
from svc_common.records import RECORD_TTL, RECORD_TTL_SECONDS
from svc_common.server import PUBLIC_MESSAGE_BYTES
from svc_common.settings import InnerSettings, InvalidSettings, OptionalPath
from svc_common.tls_files import InvalidTlsFiles, TlsFiles

_HOST = r"(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)"
_ORIGIN = r"(\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9._-]+(:[0-9]+)?|[a-z]+://\[[0-9a-f:.]+\](:[0-9]+)?)"


class BadSetting(Exception):  # noqa: N818
    """A setting whose value cannot be used. The text is for the operator, and names the variable."""


class GatewaySettings(InnerSettings):
    """Settings of a gateway. Each is a flag and a variable: --http-port and QUIRE_HTTP_PORT."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gateway_svc")

    http_port: int = Field(8000, ge=0, le=65535, description="port for HTTP clients; 0 takes a free one")
    uds: OptionalPath = Field(
        None,
        description="path of a Unix socket for HTTP clients, in place of http_port. Its mode is 0777 less the umask; "
        "connecting needs write permission. Unset: none",
    )
    grpc_port: int = Field(50051, ge=0, le=65535, description="port for gRPC clients; 0 takes a free one")
    gateway_metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of /metrics, which asks for no credential; 0 takes a free one; unset: none. Without api_keys "
        "/metrics is on http_port too",
    )
    schedulers_at: Addresses = Field(
        "127.0.0.1:50052",
        description="schedulers as host:port, separated by commas; the gateway uses the one that leads",
    )
    scheduler_patience: float = Field(
        60.0, ge=0, description="seconds that running requests wait while no scheduler can be reached"
    )
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
    chat_template: str | None = Field(
        None, description="file of a Jinja chat template, or the template itself, instead of the model's own"
    )
    chat_template_kwargs: str | None = Field(
        None,
        description='JSON object of default variables of the chat template, such as {"enable_thinking": false}; those '
        "of a chat replace them",
    )
    chat_roles: ChatRoles | None = Field(
        None,
        description="roles of a chat's messages that the template knows beside system, developer, user, assistant and "
        "tool, separated by commas",
    )
    tool_format: str = Field(
        "auto",
        min_length=1,
        description="how the model writes calls of tools: auto (as its chat template shows it, and json if the "
        f"template does not take tools), none, or one of {', '.join(TOOL_FORMATS)}",
    )
    reasoning_format: str = Field(
        "auto",
        min_length=1,
        description="how the model marks its reasoning: auto (as its chat template shows it, if at all), none, or one "
        f"of {', '.join(REASONING_FORMATS)}",
    )
    generation_config: str = Field(
        "auto",
        min_length=1,
        description="default sampling values of requests: model (the model's generation_config.json), auto (the same "
        "if the file exists), quire (Quire's own), or a directory with such a file",
    )
    override_generation_config: str | None = Field(
        None,
        description="JSON object of default sampling values that replace those of generation_config: temperature, "
        "top_p, top_k, min_p, typical_p, repetition_penalty, max_new_tokens; null is Quire's own",
    )
    task: TaskChoice = Field("auto", description=TASK)
    models: ModelsFile = Field(None, description=MODELS)
    api_keys: Path | None = Field(
        None, description="TOML file of API keys, read again when it changes; unset: no key is required"
    )
    tls_cert_file: OptionalPath = Field(
        None, description="PEM file of a certificate, with its chain, for both ports of clients; unset: no TLS"
    )
    tls_key_file: OptionalPath = Field(None, description="PEM file of the key of tls_cert_file, without a password")
    allowed_hosts: str = Field(
        "",
        pattern=rf"^\s*({_HOST}(\s*,\s*{_HOST})*)?\s*$",
        description="names that a Host header over HTTP may have, separated by commas, beside addresses; *.name is all "
        "names below one, * any; empty: localhost if host is on loopback, else any",
    )
    cors_origins: str = Field(
        "",
        pattern=rf"^\s*({_ORIGIN}(\s*,\s*{_ORIGIN})*)?\s*$",
        description="origins of web pages that may use the HTTP API, such as https://chat.example.com, separated by "
        "commas; * is all; empty: none",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path at which a proxy serves the HTTP API, such as /llm; calls are answered with it and without",
    )
    stream_usage: bool = Field(
        False,
        description="whether every stream of /v1/chat/completions and /v1/completions ends with its usage and has the "
        "usage so far in each event, whatever its stream_options are, as in vLLM; for a proxy that bills by it",
    )
    tokens_as_token_ids: bool = Field(
        False,
        description="whether log-probabilities of /v1/chat/completions and /v1/completions have token_id:N instead of "
        "a token's text where a request does not set return_tokens_as_token_ids",
    )
    max_logprobs: int = Field(
        DEFAULT_MAX_LOGPROBS,
        ge=0,
        le=HIGHEST_MAX_LOGPROBS,
        description="highest logprobs, top_logprobs and prompt_logprobs of a request",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=2**32 - 1,
        description="what the seeds of requests without one are drawn from: the same requests in the same order have "
        "the same seeds after each start, and at each gateway with the same value; unset: they are random",
    )
    unknown_fields: UndefinedFields = Field(
        UndefinedFields.WARN,
        description="fields of HTTP bodies that no API defines: refuse; warn (a near miss of a known name is refused, "
        "others are ignored and named in the answer's header x-quire-ignored-fields); or ignore",
    )
    max_http_connections: int = Field(
        4096,
        ge=1,
        description="HTTP connections at most; where there are more, the one that has been idle longest is closed",
    )
    max_http_connections_per_address: int | None = Field(
        None,
        ge=1,
        description="HTTP connections of one client's address at most; where there are more, its oldest idle one is "
        "closed; unset: no bound, since behind a proxy or NAT many clients have one address",
    )
    http_read_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds in which a TLS handshake of the HTTP port, the headers of a request, then its body, and "
        "each message of a WebSocket must arrive",
    )
    max_grpc_connections: int = Field(4096, ge=1, description="gRPC connections at most; further ones are closed")
    max_grpc_message_bytes: int = Field(
        4 * 2**20,
        ge=2**16,
        le=PUBLIC_MESSAGE_BYTES,
        description="bytes of a gRPC message from a client at most; all streams of a gateway wait while gRPC copies "
        "and parses a large one",
    )
    grpc_read_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds in which the handshakes of a gRPC connection, and the message of a call that has one, "
        "must each come",
    )
    max_tenant_calls: int | None = Field(
        None,
        ge=1,
        description="calls of one tenant in progress at most, at each port of a gateway, streams and requests of "
        "WebSockets among them; unset: as many as the port has connections left, so half of them at most. "
        "It needs api_keys: without keys there is one tenant",
    )
    body_memory: float = Field(
        0.5,
        ge=2 * PUBLIC_MESSAGE_BYTES / 2**30,
        description="GiB that bodies of calls take at most at a gateway from when they arrive until their requests are "
        "submitted; with api_keys a tenant's take no more than they leave free",
    )
    record_ttl: int = Field(RECORD_TTL_SECONDS, ge=60, description=RECORD_TTL)
    named_retention: str | None = Field(
        None,
        pattern=PATTERN,
        description="retention of requests with a name that ask for none: none, until_end, or seconds after the end; "
        "unset: QUIRE_RECORD_TTL",
    )
    unnamed_retention: str = Field(
        "until_end",
        pattern=PATTERN,
        description="the same of generations without a name: none, until_end, or seconds. Embeddings, "
        "classifications and scores that ask for none have no records",
    )
    drain_grace: float = Field(30.0, ge=0, description="seconds after SIGTERM in which running requests may end")

    @property
    def scheduler_addresses(self) -> list[HostPort]:
        return split_addresses(self.schedulers_at)

    def tls_files(self) -> TlsFiles | None:
        """The files of TLS for clients; None: there is none. Raises BadSetting."""
        files = {"QUIRE_TLS_CERT_FILE": self.tls_cert_file, "QUIRE_TLS_KEY_FILE": self.tls_key_file}
        given = {name: path for name, path in files.items() if path is not None}
        if not given:
            return None
        if missing := files.keys() - given:
            raise BadSetting(f"{missing.pop()}: not set, and TLS needs a certificate and its key")
        try:
            return TlsFiles(*given.items())
        except InvalidTlsFiles as error:
            raise BadSetting(str(error)) from error

    def key_file(self) -> KeyFile | None:
        """The file of API keys; None: no key is required. Raises BadSetting."""
        try:
            return None if self.api_keys is None else KeyFile(self.api_keys)
        except InvalidKeyFile as error:
            raise BadSetting(f"QUIRE_API_KEYS: {error}") from error

    def call_shares(self, max_connections: int) -> TenantShares:
        """Places for the calls in progress at a port with so many connections."""
        if self.api_keys is None:
            return CallLimits.unlimited().calls
        return TenantShares(max_connections, CALLS, most_per_tenant=self.max_tenant_calls)

    def body_shares(self) -> TenantShares:
        """Bytes for the bodies of both ports."""
        return TenantShares(int(self.body_memory * 2**30), BODY_BYTES, has_tenants=self.api_keys is not None)

    def slow_message_shares(self) -> TenantShares:
        """Places for gRPC messages that arrive slowly, each of up to `max_grpc_message_bytes`."""
        total = int(self.body_memory * 2**30) // self.max_grpc_message_bytes
        return TenantShares(total, SLOW_MESSAGES, has_tenants=self.api_keys is not None)

    @property
    def allowed_host_patterns(self) -> tuple[str, ...]:
        return _split(self.allowed_hosts)

    @property
    def cors_origin_list(self) -> tuple[str, ...]:
        return _split(self.cors_origins)

    @property
    def retention_rules(self) -> RetentionRules:
        named = self.named_retention
        return RetentionRules(
            self.record_ttl, None if named is None else Retention.parse(named), Retention.parse(self.unnamed_retention)
        )

    @field_validator("max_http_connections_per_address")
    @classmethod
    def _check_address(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number is not None and info.data.get("uds") is not None:
            raise ValueError("must be unset with QUIRE_UDS: clients of a Unix socket have no addresses")
        return number

    @field_validator("max_tenant_calls")
    @classmethod
    def _check_calls(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number is not None and info.data.get("api_keys") is None:
            raise ValueError("must be unset without QUIRE_API_KEYS: there is one tenant")
        return number

    @field_validator("named_retention", "unnamed_retention")
    @classmethod
    def _check_retention(cls, text: str | None, info: ValidationInfo) -> str | None:
        most = info.data.get("record_ttl")  # absent if it has an error itself
        if text is not None and most is not None and Retention.parse(text).seconds > most:
            raise ValueError(f"must be at most QUIRE_RECORD_TTL, which is {most}")
        return text

    def check_start(self) -> None:
        try:
            self.tls_files()
            for model in self.model_settings():
                _check_model(model)
        except BadSetting as error:
            raise InvalidSettings([str(error)]) from error

    def model_settings(self) -> list[ModelSettings]:
        """The settings of each model, the default one first. Raises InvalidModelsFile."""
        if self.models is not None:
            return read_models_file(self.models)
        return [
            ModelSettings(
                model=self.model,
                revision=self.revision,
                tokenizer=self.tokenizer,
                tokenizer_revision=self.tokenizer_revision,
                served_names=split_names(self.served_model_name or ""),
                chat_template=self.chat_template,
                chat_template_kwargs=self.chat_template_kwargs,
                chat_roles=split_roles(self.chat_roles or ""),
                tool_format=self.tool_format,
                reasoning_format=self.reasoning_format,
                generation_config=self.generation_config,
                override_generation_config=self.override_generation_config,
                task=self.task,
            )
        ]


def _check_model(model: ModelSettings) -> None:
    """Raises BadSetting for what can be known without the files of the model."""
    try:
        check_formats(model)
        if model.chat_template:
            read_template(model.chat_template)
        read_template_variables(model.chat_template_kwargs)
    except BadSetting as error:
        raise BadSetting(model.locate(error)) from error


def check_formats(model: ModelSettings) -> None:
    """Raises BadSetting for a format that is not known."""
    for variable, name, known in (
        ("QUIRE_TOOL_FORMAT", model.tool_format, TOOL_FORMAT_NAMES),
        ("QUIRE_REASONING_FORMAT", model.reasoning_format, REASONING_FORMAT_NAMES),
    ):
        if name not in known:
            raise BadSetting(f"{variable}: {name} is not one of {', '.join(known)}")


def read_template(setting: str) -> str:
    """The chat template of QUIRE_CHAT_TEMPLATE, a path or the template itself. Raises BadSetting."""
    try:
        return Path(setting).read_text()
    except (OSError, ValueError) as error:
        # A template without a tag and without a line break would ignore the messages, so this is a path.
        if not any(character in setting for character in "{}\n"):
            why = error.strerror if isinstance(error, OSError) else error
            raise BadSetting(f"QUIRE_CHAT_TEMPLATE: {setting} cannot be read: {why}") from error
        return setting


def read_template_variables(setting: str | None) -> dict[str, Any]:
    """The variables of QUIRE_CHAT_TEMPLATE_KWARGS. Raises BadSetting."""
    try:
        variables = json.loads(setting, parse_constant=_reject_constant) if setting else {}
    except (ValueError, RecursionError) as error:
        raise BadSetting(f"QUIRE_CHAT_TEMPLATE_KWARGS is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise BadSetting("QUIRE_CHAT_TEMPLATE_KWARGS is not a JSON object")
    return variables


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())
