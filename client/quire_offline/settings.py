"""From the keyword arguments of `LLM` to the settings of the parts that serve a model.

A name is that of a setting of worker, gateway or scheduler without QUIRE_, or an argument of vLLM's class, which the
table of `quire serve` translates. Settings that are not given have the values of their variables, or their defaults.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.settings import GatewaySettings
from quire_client.requests import no_option
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.settings import SchedulerSettings
from svc_common.model_settings import ModelSettings
from svc_common.redaction import redact
from svc_common.settings import InnerSettings, ServiceSettings
from svc_common.supervisor.settings import GATEWAY_SETTINGS
from svc_common.supervisor.vllm_flag_table import FLAGS
from svc_common.supervisor.vllm_flags import FlagRefused, Refused, Value, Values, VllmFlag, read_flags
from worker_svc.settings import WorkerSettings

_OF_PROCESSES = {*InnerSettings.model_fields, "worker_port", "worker_metrics_port", "drain_grace", "profile_dir"}
_OF_WORKER = WorkerSettings.model_fields.keys() - _OF_PROCESSES
_OF_SCHEDULER = {"policy", "ageing_seconds", "preemption", "gap_factor"}
NAMES = _OF_WORKER | {*GATEWAY_SETTINGS, "max_logprobs"} | _OF_SCHEDULER
"""The settings that an argument may set."""

_FLAGS: Mapping[str, VllmFlag] = {
    name.removeprefix("--").replace("-", "_"): flag for flag in FLAGS for name in (flag.name, *flag.aliases)
}
# All prompts of a call are queued at once, and nobody else waits.
_UNBOUNDED = AdmissionLimits(max_requests=2**62, max_tokens=2**62, max_tenant_requests=2**62, max_tenant_tokens=2**62)

S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True)
class OfflineSettings:
    """The settings of the parts of one process."""

    worker: WorkerSettings
    model: ModelSettings
    limits: SchedulerLimits
    undefined_fields: UndefinedFields
    """What is done about fields of bodies that no API defines."""
    max_logprobs: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "OfflineSettings":
        """From keyword arguments; None is the same as absent.

        Raises TypeError for a name that is not known, ValueError for a value that cannot be used. Both name the
        argument.
        """
        values: dict[str, Any] = {}
        for name, value in options.items():
            if value is not None:
                values |= _read(name, value)
        gateway = _make(GatewaySettings, values | {"models": None})  # the file of a deployment with several
        scheduler = _make(SchedulerSettings, values)
        return cls(
            worker=_make(WorkerSettings, values),
            model=gateway.model_settings()[0],
            limits=replace(scheduler.limits, queue=_UNBOUNDED),
            undefined_fields=gateway.unknown_fields,
            max_logprobs=gateway.max_logprobs,
        )


def _read(name: str, value: Any) -> dict[str, Any]:
    """The settings that one argument sets."""
    flag = _FLAGS.get(name)
    translates = isinstance(flag, Value | Values) or (flag is not None and name not in NAMES)
    if flag is None or (name in NAMES and not translates):
        if name not in NAMES:
            raise no_option(name, [*sorted(NAMES), *(one for one, flag in _FLAGS.items() if not _is_refused(flag))])
        return {name: value}
    try:
        _, variables = read_flags(_arguments(flag, value), FLAGS)
    except FlagRefused as error:
        # Without the text's own name, which is a flag's.
        raise ValueError(str(error).replace(flag.name, name, 1)) from None
    read = {variable.removeprefix("QUIRE_").lower(): text for variable, text in variables.items()}
    for variable in variables:
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


def _make(kind: type[S], values: Mapping[str, Any]) -> S:
    """Settings of one service, of which each has its own part. Raises ValueError."""
    try:
        return kind(**{name: value for name, value in values.items() if name in kind.model_fields})
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"][:1]))
        message = problem["msg"].removeprefix("Value error, ")
        given = f", not {values[name]!r}" if name in values else f" (the variable QUIRE_{name.upper()})"
        raise ValueError(redact(f"{name}: {message[:1].lower()}{message[1:]}{given}")) from None
    except SettingsError as error:
        raise ValueError(redact(str(error))) from None
