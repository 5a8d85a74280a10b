"""Reads the files that sentence-transformers writes beside a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from svc_common.models import module_kind
from worker_svc.errors import UnsupportedModel

T = TypeVar("T")


def read_json(path: Path, default: T) -> T:
    """A JSON file of the type of `default`, which stands for a file that is missing. Raises UnsupportedModel."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, type(default)):
        raise UnsupportedModel(f"{path} has another form than expected")
    return value


def read_modules(directory: Path) -> list[dict[str, Any]]:
    """The modules of modules.json, none without the file. Raises UnsupportedModel."""
    modules: list[Any] = read_json(directory / "modules.json", [])
    if not all(isinstance(module, dict) for module in modules):
        raise UnsupportedModel(f"{directory / 'modules.json'} has another form than expected")
    return modules


def module_config(directory: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a module of modules.json, empty without its file. Raises UnsupportedModel."""
    config: dict[str, Any] = {}
    return read_json(directory / module_folder(directory, module) / "config.json", config)


def module_folder(directory: Path, module: Mapping[str, Any]) -> Path:
    """The folder of a module of modules.json, relative to the model's. Raises UnsupportedModel if it is outside."""
    folder = Path(str(module.get("path", "")))
    if folder.is_absolute() or ".." in folder.parts:
        raise UnsupportedModel(f"{directory / 'modules.json'} names a folder outside of the model: {folder}")
    return folder


def module_folders(directory: Path) -> list[Path]:
    """The folders that exist of the modules behind the transformer, as `module_folder`. Raises UnsupportedModel."""
    behind = (module for module in read_modules(directory) if module_kind(module) != "Transformer")
    folders = (module_folder(directory, module) for module in behind)
    return [folder for folder in dict.fromkeys(folders) if folder.parts and (directory / folder).is_dir()]
