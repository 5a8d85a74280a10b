"""From the keyword arguments of `LLM` to the settings of the parts that serve a model.

A name is that of a setting of worker, gateway or scheduler without QUIRE_, or an argument of vLLM's class, which the
table of `quire serve` translates. Settings that are not given have the values of their variables, or their defaults;
variables of other settings, of ports for example, are not read.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsError

from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.settings import GatewaySettings
from quire_client.requests import no_option
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.settings import SchedulerSettings
from svc_common.model_settings import ModelSettings
from svc_common.redaction import redact
from svc_common.settings import InnerSettings, ServiceSettings, name_settings
from svc_common.supervisor.settings import GATEWAY_SETTINGS
from svc_common.supervisor.vllm_flag_table import FLAGS
from svc_common.supervisor.vllm_flags import (
    GIVEN_KEYS,
    FlagRefused,
    JsonObject,
    Refused,
    Value,
    Values,
    VllmFlag,
    read_flags,
)
from worker_svc.settings import WorkerSettings

_OF_PROCESSES = {*InnerSettings.model_fields, "worker_port", "worker_metrics_port", "drain_grace", "profile_dir"}
_OF_WORKER = WorkerSettings.model_fields.keys() - _OF_PROCESSES
_OF_SCHEDULER = {"policy", "ageing_seconds", "preemption", "gap_factor"}
NAMES = _OF_WORKER | {*GATEWAY_SETTINGS, "max_logprobs", "seed"} | _OF_SCHEDULER
"""The settings that an argument may set."""
_FROM_VARIABLES = NAMES | {"unknown_fields"}
"""The settings that are read from variables."""

_FLAGS: Mapping[str, VllmFlag] = {
    name.removeprefix("--").replace("-", "_"): flag for flag in FLAGS for name in (flag.name, *flag.aliases)
} | {  # a setting may have an object too where its flag has another name
    flag.variable.removeprefix("QUIRE_").lower(): flag for flag in FLAGS if isinstance(flag, JsonObject)
}
# All prompts of a call are queued at once, and nobody else waits.
_UNBOUNDED = AdmissionLimits(max_requests=2**62, max_tokens=2**62, max_tenant_requests=2**62, max_tenant_tokens=2**62)

S = TypeVar("S", bound=ServiceSettings)


def _in_given_order(limits: SchedulerLimits) -> SchedulerLimits:
    """Prompts are computed in the order in which the engine queues them."""
    return replace(limits, queue=_UNBOUNDED, policy_settings=replace(limits.policy_settings, short_prompts_first=False))


@dataclass(frozen=True, slots=True)
class OfflineSettings:
    """The settings of the parts of one process."""

    worker: WorkerSettings
    model: ModelSettings
    limits: SchedulerLimits
    undefined_fields: UndefinedFields
    """What is done about fields of bodies that no API defines."""
    max_logprobs: int
    seed: int | None
    """What the seeds of requests without one are drawn from; None: they are random."""
    arguments: Mapping[str, str]
    """The arguments of settings whose values do not come from variables: those that were given, or could be."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "OfflineSettings":
        """From keyword arguments; None is the same as absent.

        Raises TypeError for a name that is not known, ValueError for a value that cannot be used. Both name the
        argument.
        """
        values: dict[str, Any] = {}
        arguments = {name: name for name in NAMES if f"QUIRE_{name.upper()}" not in os.environ}
        for argument, value in options.items():
            if value is not None:
                read = _read(argument, value)
                values |= read
                arguments |= dict.fromkeys(read, argument)
        given = _Given(values, options, arguments)
        gateway = _make(GatewaySettings, given)
        scheduler = _make(SchedulerSettings, given)
        return cls(
            worker=_make(WorkerSettings, given),
            model=gateway.model_settings()[0],
            limits=_in_given_order(scheduler.limits),
            undefined_fields=gateway.unknown_fields,
            max_logprobs=gateway.max_logprobs,
            seed=gateway.seed,
            arguments=arguments,
        )

    def in_arguments(self, text: str) -> str:
        """The text of an error with arguments in place of the variables that were not set."""
        return name_settings(text, self.arguments)


@dataclass(frozen=True, slots=True)
class _Given:
    """The values of settings that arguments have set, the arguments, and their names by setting."""

    values: Mapping[str, Any]
    options: Mapping[str, Any]
    arguments: Mapping[str, str]


def _read(name: str, value: Any) -> dict[str, Any]:
    """The settings that one argument sets."""
    flag = _FLAGS.get(name)
    translates = isinstance(flag, Value | Values) or (flag is not None and name not in NAMES)
    if flag is None or (name in NAMES and not translates):
        if name not in NAMES:
            raise no_option(name, [*sorted(NAMES), *(one for one, flag in _FLAGS.items() if not _is_refused(flag))])
        return {name: value}
    try:
        variables = read_flags(_arguments(flag, value), FLAGS).variables
    except FlagRefused as error:
        # Without the text's own name, which is a flag's.
        raise ValueError(str(error).replace(flag.name, name, 1)) from None
    read = {variable.removeprefix("QUIRE_").lower(): text for variable, text in variables.items()}
    for variable in variables:
        if variable == GIVEN_KEYS:
            raise ValueError(f"{name} is not an argument: it is about a server")
        if variable.removeprefix("QUIRE_").lower() not in NAMES:
            raise ValueError(f"{name} is not an argument: set the variable {variable}, or leave it out")
    return read


def _is_refused(flag: VllmFlag) -> bool:
    return isinstance(flag, Refused)


def _arguments(flag: VllmFlag, value: Any) -> list[str]:
    """A value as on the command line of `quire serve`."""
    if isinstance(value, bool) and flag.num_values == "none":
        return [flag.name if value else f"--no-{flag.name.removeprefix('--')}"]
    if isinstance(value, list | tuple) and flag.num_values == "many":
        return [flag.name, *map(str, value)]
    text = json.dumps(value) if isinstance(value, Mapping | list | tuple | bool) else str(value)
    return [f"{flag.name}={text}"]


def _make(kind: type[S], given: _Given) -> S:
    """Settings of one service, of which each has its own part. Raises ValueError."""
    fields = kind.model_fields
    # What has a value here is not read from variables, such as QUIRE_SCHEDULER_PORT, which Kubernetes may set.
    others = {name: field.get_default() for name, field in fields.items() if name not in _FROM_VARIABLES}
    try:
        return kind(**others, **{name: value for name, value in given.values.items() if name in fields})
    except ValidationError as error:
        raise ValueError(redact(_explain(error.errors()[0], given))) from error
    except SettingsError as error:
        raise ValueError(redact(str(error))) from error


def _explain(problem: ErrorDetails, given: _Given) -> str:
    message = name_settings(problem["msg"].removeprefix("Value error, "), given.arguments)
    if not problem["loc"]:  # of several settings: the text names them
        return message
    name = str(problem["loc"][0])
    message = f"{message[:1].lower()}{message[1:]}"
    if name not in given.values:
        return f"{name}: {message} (the variable QUIRE_{name.upper()})"
    argument = given.arguments[name]
    flag = _FLAGS.get(argument)
    hint = f"; {flag.instead}" if isinstance(flag, Refused) else ""  # what it means to vLLM is not served
    return f"{argument}: {message}, not {given.options[argument]!r}{hint}"
