"""A model's config.json, as stored and as completed by transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import architecture_of

_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""What transformers' configs call the number of layers."""
_MOST_LAYERS = 10_000  # the largest models have hundreds


def raw_config(directory: Path) -> dict[str, Any]:
    """The content of config.json. Raises UnsupportedModel if it cannot be read, or is no object."""
    return read_object(directory / "config.json")


def model_types(raw: Mapping[str, Any]) -> list[str]:
    """The `model_type` of a config.json, and that of its text model if it names one."""
    text = raw.get("text_config")
    named = text.get("model_type") if isinstance(text, dict) else None
    return [str(raw.get("model_type")), *([] if named is None else [str(named)])]


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file. Raises UnsupportedModel if it cannot be read, or is no object."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{path} must be an object, as transformers writes it")
    return raw


def _check_num_layers(raw: Mapping[str, Any], directory: Path) -> None:
    """Raises UnsupportedModel for more layers than a model has: lists with a part for each take memory and minutes."""
    text = raw.get("text_config")
    for config in (raw, text if isinstance(text, dict) else {}):
        for name in _NUM_LAYERS:
            if isinstance(value := config.get(name), int) and value > _MOST_LAYERS:
                raise UnsupportedModel(
                    f"{directory / 'config.json'}: {name} is {value}; at most {_MOST_LAYERS} are read"
                )


def read_config(directory: Path) -> Any:
    """The config of the model in a directory, with transformers' values for what config.json leaves out.

    Raises UnsupportedModel if transformers does not know the architecture, or refuses a value, and StartupFailed if the
    package that registers the architecture fails.
    """
    raw = raw_config(directory)
    _check_num_layers(raw, directory)
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UnsupportedModel(f"{directory / 'config.json'}: architectures must be a list of names, not {names!r}")
    from transformers import CONFIG_MAPPING, AutoConfig

    for model_type in model_types(raw):
        architecture_of(model_type)  # imports its package, which registers its config with transformers
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config's class raises anything for values that it does not expect
        if str(raw.get("model_type")) in CONFIG_MAPPING:
            raise UnsupportedModel(f"{directory / 'config.json'}: transformers refuses it: {error!r}") from error
        named = ", ".join(names or [str(raw.get("model_type") or "unknown")])
        raise UnsupportedModel(
            f"the model in {directory} is of the architecture {named}, which the installed transformers does not know"
        ) from error
    config.architectures = config.architectures or None  # an empty list names no class either
    return config
