"""Settings of the served models: of one model by variables, or of several by a TOML file (QUIRE_MODELS)."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.types import JsonValue

from svc_common.model_tasks import AUTO_TASK, ModelTask, task_of
from svc_common.models import (
    ModelNotFound,
    ServedModel,
    check_names,
    find_source,
    find_tokenizer,
    is_hub_id,
    resolve_model,
    split_names,
)
from svc_common.settings import OptionalPath

_ABSENT: dict[str, Any] = {
    "generation_config": "auto",
    "tool_format": "auto",
    "reasoning_format": "auto",
    "task": AUTO_TASK,
    "workers": 1,
}
"""Default values of settings; the default of all others is empty."""


TaskChoice = Literal["auto", "generate", "embed", "pooling"]
"""The value of QUIRE_TASK."""

TASK = (
    "what the model computes; auto: as its files say; generate: tokens; embed: vectors of prompts, also by a model "
    "that could generate; pooling: what a model's head computes, scores of pairs of texts or numbers of labels, and "
    "vectors of prompts by any other model"
)

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class InvalidModelsFile(Exception):  # noqa: N818
    """An invalid file of models. The text names file, entry and key."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of one model, each with the meaning of the QUIRE_… setting of that name; None where absent.

    `served_names` are its name and its aliases; empty: the name follows from `model`. `workers` is the number that the
    supervisor starts. `origin` is the file and entry of the settings; empty: variables.
    """

    model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    served_names: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_kwargs: str | None = None
    chat_roles: tuple[str, ...] = ()
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    generation_config: str = "auto"
    override_generation_config: str | None = None
    task: str = AUTO_TASK
    workers: int = 1
    origin: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name and its aliases. Raises ModelNotFound where `model` names no model."""
        return self.served_names or (find_source(self.model, self.revision).name,)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that name the model, its tokenizer and its task, for workers and `worker_svc.prepare`."""
        named = {
            "MODEL": self.model,
            "REVISION": self.revision,
            "TOKENIZER": self.tokenizer,
            "TOKENIZER_REVISION": self.tokenizer_revision,
            "SERVED_MODEL_NAME": ",".join(self.served_names) or None,
            "TASK": None if self.task == AUTO_TASK else self.task,
        }
        return {f"QUIRE_{name}": value for name, value in named.items() if value is not None}

    @property
    def model_task(self) -> ModelTask:
        """What the model computes; GENERATE also while its files are not there."""
        try:
            return task_of(self.resolve().path, self.task)
        except ModelNotFound:
            return ModelTask.GENERATE

    def locate(self, message: object) -> str:
        """The text of an error in these settings, with their origin."""
        return f"{self.origin}: {message}" if self.origin else str(message)

    def check(self) -> None:
        """Raises ModelNotFound where the model or its tokenizer is neither a file, nor a directory, nor a hub id."""
        try:
            find_source(self.model, self.revision)
            find_tokenizer(self.model, self.revision, self.tokenizer, self.tokenizer_revision)
        except ModelNotFound as error:
            raise ModelNotFound(self.locate(error)) from error

    def resolve(self) -> ServedModel:
        """The model's configuration and tokenizer on disk. Raises ModelNotFound."""
        try:
            return resolve_model(
                self.model,
                self.revision,
                self.tokenizer,
                self.tokenizer_revision,
                self.served_names,
                with_weights=False,
            )
        except ModelNotFound as error:
            raise ModelNotFound(self.locate(error)) from error


def read_models_file(path: Path) -> list[ModelSettings]:
    """The models of a TOML file's `[[models]]` tables, in their order; at least one.

    Raises InvalidModelsFile, which names the file, and the entry and key at fault.
    """
    try:
        file = _ModelsFile.model_validate(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidModelsFile(f"{path}: {error}") from error
    except ValidationError as error:
        raise InvalidModelsFile(f"{path}: {_explain(error)}") from None
    if not file.models:
        raise InvalidModelsFile(f"{path}: there is no [[models]] table")
    models = [entry.settings(path.parent, f"{path}: models[{index}]") for index, entry in enumerate(file.models)]
    _check_distinct(models)
    return models


def _check_distinct(models: list[ModelSettings]) -> None:
    owners: dict[str, ModelSettings] = {}
    for settings in models:
        try:
            names = settings.names
        except ModelNotFound as error:
            raise InvalidModelsFile(settings.locate(error)) from error
        for name in names:
            if (owner := owners.setdefault(name, settings)) is not settings:
                other = owner.origin.rpartition(": ")[2]
                raise InvalidModelsFile(
                    settings.locate(f"the name {name} is that of {other} too; set served_model_name")
                )


def split_roles(roles: str) -> tuple[str, ...]:
    """The roles in QUIRE_CHAT_ROLES. Raises ValueError."""
    return check_roles([role.strip() for role in roles.split(",")]) if roles else ()


def check_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """Roles that a chat's messages may have. Raises ValueError for one that could be more than a word in a template."""
    for role in roles:
        if not _ROLE.fullmatch(role):
            raise ValueError(f"{role!r} is not a role: 1 to 64 letters, digits, '_' and '-'")
    return tuple(roles)


def _listed(check: Callable[[Sequence[str]], tuple[str, ...]]) -> BeforeValidator:
    """Reads a list of strings, or a string that separates them by commas."""

    def read(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [item.strip() for item in value.split(",")] if value else []
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return check(value)
        raise ValueError("must be a string or a list of strings")

    return BeforeValidator(read)


class _ModelEntry(BaseModel):
    """A `[[models]]` table."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    served_model_name: Annotated[tuple[str, ...], _listed(check_names)] = ()
    chat_template: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    chat_roles: Annotated[tuple[str, ...], _listed(check_roles)] = ()
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    generation_config: str = Field("auto", min_length=1)
    override_generation_config: dict[str, JsonValue] | None = None
    task: TaskChoice = AUTO_TASK
    workers: int = Field(1, ge=1, le=64)

    def settings(self, directory: Path, origin: str) -> ModelSettings:
        """The entry, with paths relative to the directory of its file."""
        generation_config = self.generation_config
        if generation_config not in ("quire", "model", "auto"):
            generation_config = str(directory / generation_config)
        return ModelSettings(
            model=_relative(directory, self.model),
            revision=self.revision or None,
            tokenizer=_relative(directory, self.tokenizer),
            tokenizer_revision=self.tokenizer_revision or None,
            served_names=self.served_model_name,
            chat_template=_relative_template(directory, self.chat_template),
            chat_template_kwargs=_as_json(self.chat_template_kwargs),
            chat_roles=self.chat_roles,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
            generation_config=generation_config,
            override_generation_config=_as_json(self.override_generation_config),
            task=self.task,
            workers=self.workers,
            origin=origin,
        )


class _ModelsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    models: list[_ModelEntry] = []


def _as_json(value: Mapping[str, JsonValue] | None) -> str | None:
    return None if value is None else json.dumps(value)


def _relative(directory: Path, named: str | None) -> str | None:
    """A path relative to a directory. A hub id that is no path there stays unchanged."""
    if not named:
        return None
    path = directory / Path(named).expanduser()
    return named if is_hub_id(named) and not path.exists() else str(path.absolute())


def _relative_template(directory: Path, template: str | None) -> str | None:
    """The file of a chat template relative to a directory, or the template itself."""
    # A template without a tag and a line break would ignore the messages, so this is a file name.
    if not template or any(character in template for character in "{}\n"):
        return template or None
    return str((directory / template).absolute())


def _explain(error: ValidationError) -> str:
    """The first error, with the path of its field."""
    problem = error.errors()[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    match problem["type"]:
        case "extra_forbidden":
            return f"{where} is not a key that is known here"
        case "value_error":
            return f"{where}: {problem['ctx']['error']}"
        case _:
            message = problem["msg"]
            return f"{where}: {message[:1].lower()}{message[1:]}, not {problem['input']!r}"


def _check_names_setting(names: str) -> str:
    split_names(names)
    return names


def _check_roles_setting(roles: str) -> str:
    split_roles(roles)
    return roles


def _check_alone(path: Path | None, info: ValidationInfo) -> Path | None:
    """Raises ValueError where a setting of one model is set together with a file of several."""
    for name in (*ModelSettings.__dataclass_fields__, "served_model_name"):
        value = info.data.get(name)
        if path is not None and value and value != _ABSENT.get(name):
            raise ValueError(f"cannot be set together with QUIRE_{name.upper()}, which belongs in the file")
    return path


ServedModelNames = Annotated[str, AfterValidator(_check_names_setting)]
"""The value of QUIRE_SERVED_MODEL_NAME."""

ChatRoles = Annotated[str, AfterValidator(_check_roles_setting)]
"""The value of QUIRE_CHAT_ROLES."""

ModelsFile = Annotated[OptionalPath, AfterValidator(_check_alone)]
"""The value of QUIRE_MODELS; a field of this type must follow those of one model, which it excludes."""

SERVED_MODEL_NAME = (
    "names under which the model is served, separated by commas: its name, then aliases; unset: the name of its "
    "directory or file, or its hub id"
)
MODELS = "TOML file of several models, instead of the settings of one; docs/operations.md describes it"
