"""Sampling defaults from generation_config.json and from the operator, checked by the ranges of requests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import create_model

from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.http_api.body_model import BodyModel, Number
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.settings import BadSetting
from gateway_svc.unvalidated_request import GenerationDefaults
from svc_common.errors import QuireError

_FILE = "generation_config.json"
_FIELDS = tuple(one for one in SAMPLING_FIELDS if one.may_be_configured)
_NAMES: Mapping[str, str] = {**{one.path: one.name for one in _FIELDS}, Field.MAX_TOKENS: "max_new_tokens"}
"""Fields that may have a default, and their names in a generation_config.json."""


_TYPES: dict[str, Any] = {one.name: (int | None if one.is_integer else Number | None, None) for one in _FIELDS}
_Config: type[BodyModel] = create_model("_Config", __base__=BodyModel, **_TYPES, max_new_tokens=(int | None, None))


def load_generation_defaults(source: str, override: str | None, model: Path) -> GenerationDefaults:
    """The defaults of fields, by QUIRE_GENERATION_CONFIG and QUIRE_OVERRIDE_GENERATION_CONFIG.

    `model` is the model's directory. Raises BadSetting, which names the variable, the field and its range.
    """
    values: dict[str, Any] = {}
    if (path := _file(source, model)) is not None:
        setting = f"QUIRE_GENERATION_CONFIG: {path}"
        try:
            config = _object(path.read_text(), setting)
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting(f"{setting} cannot be read: {error}") from error
        # The file has other purposes too, such as end-of-text tokens: other fields are ignored.
        values = {name: config[name] for name in _NAMES.values() if name in config}
        _defaults(values, setting)
    if override:
        setting = "QUIRE_OVERRIDE_GENERATION_CONFIG"
        overriding = _object(override, setting)
        for name in overriding.keys() - _NAMES.values():
            raise BadSetting(f"{setting}: {name} is not one of {', '.join(_NAMES.values())}")
        _defaults(overriding, setting)
        values |= overriding
    return _defaults(values, "")


def _file(source: str, model: Path) -> Path | None:
    """The file that QUIRE_GENERATION_CONFIG names, if it names one."""
    match source:
        case "quire":
            return None
        case "auto":
            return model / _FILE if (model / _FILE).exists() else None
        case "model":
            directory = model
        case _:
            directory = Path(source)
    if not (directory / _FILE).is_file():
        raise BadSetting(f"QUIRE_GENERATION_CONFIG is {source}, and {directory} has no {_FILE}")
    return directory / _FILE


def _object(text: str, setting: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSetting(f"{setting} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadSetting(f"{setting} is not a JSON object")
    return value


def _defaults(values: Mapping[str, Any], setting: str) -> GenerationDefaults:
    """Raises BadSetting where a value is not of its type or not in its range."""
    check = FieldChecker(lambda which, item_index=None: _NAMES[which])
    try:
        read = _Config.of(values).model_dump(exclude_none=True)
        max_tokens = read.pop("max_new_tokens", None)
        defaults = GenerationDefaults(read, max_tokens)
        for one in _FIELDS:
            check.sampling(one, defaults.sampling)
        check.max_tokens(defaults.max_tokens)
    except QuireError as error:
        raise BadSetting(f"{setting}: {error.field} {error.message}, not {values[str(error.field)]!r}") from error
    return defaults
