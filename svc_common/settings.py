"""Settings of a service: QUIRE_… variables, and the same names as flags. An invalid value stops the start-up."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliImplicitFlag, SettingsConfigDict, SettingsError

from svc_common.addresses import Host
from svc_common.redaction import redact

BAD_SETTINGS = 2
"""The exit status of a service that cannot start with its settings, or with the files that they name: it is not
restarted.
"""


class ServiceSettings(BaseSettings):
    """Settings of every service."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        hide_input_in_errors=True,
    )

    host: Host = Field("127.0.0.1", description="address to listen on")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="lowest level that is logged")

    def check_start(self) -> None:
        """Raises InvalidSettings for a valid value with which the service would not start, as far as it can be
        known before.
        """


EMPTY_IS_UNSET = BeforeValidator(lambda value: None if value == "" else value)
"""Of a setting that may be None: an empty value is as good as unset."""

OptionalPath = Annotated[Path | None, EMPTY_IS_UNSET]
"""A path; an empty one is as good as unset."""

INSECURE = (
    "inner ports check nobody, and may listen beyond loopback: for networks where something else, such as a service "
    "mesh, lets only Quire's services connect to each other"
)


class InnerSettings(ServiceSettings):
    """Settings of how services of a deployment prove their roles to each other."""

    deployment_secret_file: OptionalPath = Field(
        None,
        description="file with the deployment's secret, at least 32 bytes, the same for all its services, which prove "
        "their roles with it to each other on loopback",
    )
    mtls_cert_file: OptionalPath = Field(
        None,
        description="PEM file of this service's certificate, with its role in it, for mutual TLS between services; "
        "docs/operations.md describes it",
    )
    mtls_key_file: OptionalPath = Field(None, description="PEM file of the key of mtls_cert_file, without a password")
    mtls_ca_file: OptionalPath = Field(
        None, description="PEM file of the deployment's CA, which has issued the certificates of all services"
    )
    insecure: CliImplicitFlag[bool] = Field(False, description=INSECURE)

    @property
    def mtls_files(self) -> dict[str, Path | None]:
        """The files of mutual TLS by the names of their settings: certificate, key, CA."""
        files = {"CERT": self.mtls_cert_file, "KEY": self.mtls_key_file, "CA": self.mtls_ca_file}
        return {f"QUIRE_MTLS_{name}_FILE": path for name, path in files.items()}


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


class InvalidSettings(Exception):  # noqa: N818
    """Invalid values: a line for each, with its variable and flag, without credentials."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def read_settings(kind: type[SettingsT], args: list[str] | None = None) -> SettingsT:
    """Settings from flags, then variables, then defaults.

    Exits with BAD_SETTINGS and the lines of InvalidSettings. A kind has its program's name as `cli_prog_name` in its
    model_config.
    """
    try:
        return parse_settings(kind, sys.argv[1:] if args is None else args)
    except InvalidSettings as error:
        for line in error.lines:
            print(f"{kind.model_config.get('cli_prog_name')}: {line}", file=sys.stderr)
        raise SystemExit(BAD_SETTINGS) from None


def parse_settings(kind: type[SettingsT], args: list[str]) -> SettingsT:
    """As `read_settings`, but raises InvalidSettings."""
    try:
        return CliApp.run(kind, cli_args=args, cli_exit_on_error=False)
    except (ValidationError, SettingsError) as error:
        raise InvalidSettings([redact(line) for line in _explain(error)]) from None


_SETTING = re.compile(r"QUIRE_([A-Z0-9_]+)(?: \(--[a-z0-9-]+\))?")


def name_settings(text: str, names: Mapping[str, str]) -> str:
    """The text of an error with these names of settings in place of their variables and flags.

    `names` are by setting. A setting without one is named by its variable.
    """
    return _SETTING.sub(lambda match: names.get(match[1].lower(), f"QUIRE_{match[1]}"), text)


def make_settings(kind: type[SettingsT], values: Mapping[str, str]) -> SettingsT:
    """Settings from these values, by name, then variables, then defaults. Raises InvalidSettings."""
    try:
        return kind(**values)
    except (ValidationError, SettingsError) as error:
        raise InvalidSettings([redact(line) for line in _explain(error)]) from None


def _explain(error: ValidationError | SettingsError) -> list[str]:
    if isinstance(error, SettingsError):
        return [str(error).removeprefix("error parsing CLI: ")]
    lines = []
    for problem in error.errors():
        if not problem["loc"]:  # of several settings: the text names them
            lines.append(str(problem["ctx"]["error"]))
            continue
        name = "_".join(str(part) for part in problem["loc"])
        setting = f"QUIRE_{name.upper()} (--{name.replace('_', '-')})"
        if problem["type"] == "value_error":  # a validator of this project, whose text is complete
            lines.append(f"{setting}: {problem['ctx']['error']}")
            continue
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        lines.append(f"{setting}: {message}, not {problem['input']!r}")
    return lines
