"""Reads the files that sentence-transformers writes beside a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svc_common.models import module_kind, read_json, read_modules
from worker_svc.errors import UnsupportedModel


def module_config(directory: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a module of modules.json, empty without its file. Raises UnsupportedModel and DamagedModelFile."""
    config: dict[str, Any] = {}
    return read_json(directory / module_folder(directory, module) / "config.json", config)


def module_folder(directory: Path, module: Mapping[str, Any]) -> Path:
    """The folder of a module of modules.json, relative to the model's. Raises UnsupportedModel if it is outside."""
    folder = Path(str(module.get("path", "")))
    if folder.is_absolute() or ".." in folder.parts:
        raise UnsupportedModel(f"{directory / 'modules.json'} names a folder outside of the model: {folder}")
    return folder


def module_folders(directory: Path) -> list[Path]:
    """The folders that exist of the modules behind the transformer. Raises UnsupportedModel and DamagedModelFile."""
    behind = (module for module in read_modules(directory) if module_kind(module) != "Transformer")
    folders = (module_folder(directory, module) for module in behind)
    return [folder for folder in dict.fromkeys(folders) if folder.parts and (directory / folder).is_dir()]
