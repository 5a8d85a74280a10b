"""What a model computes, by its files: tokens, vectors, scores of pairs, or numbers for labels."""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from svc_common.models import module_kind, read_modules


class ModelTask(Enum):
    """What a model computes."""

    GENERATE = "generate"
    """Tokens."""
    EMBED = "embed"
    """A vector of each prompt."""
    SCORE = "score"
    """A number for each pair of texts."""
    CLASSIFY = "classify"
    """A number for each of several labels of a text."""


AUTO_TASK: Final = "auto"
"""The setting of a model whose files say what it computes."""
POOLING_TASK: Final = "pooling"
"""The setting of a model that computes values: those of its head if its files say so, else vectors."""


def task_of(directory: Path, chosen: str = AUTO_TASK) -> ModelTask:
    """The task of the model in a directory, `chosen` or by its files.

    One of a class without a head, such as BertModel, embeds, and so does one whose modules.json, which
    sentence-transformers writes, has a pooling. One for the classification of sequences classifies; with one label it
    is a cross-encoder, which scores, and so does one whose modules.json makes scores of logits. Any other model
    generates, as does one whose config.json cannot be read.

    Raises DamagedModelFile for a modules.json of another form.
    """
    if chosen not in (AUTO_TASK, POOLING_TASK):
        return ModelTask(chosen)
    config = _config_of(directory)
    names = _class_names(config)
    if _has_labels(names):
        return ModelTask.SCORE if len(_labels(config)) == 1 else ModelTask.CLASSIFY
    kinds = [module_kind(module) for module in read_modules(directory)]
    if "LogitScore" in kinds:
        return ModelTask.SCORE
    if chosen == POOLING_TASK:
        return ModelTask.EMBED
    if names and all(name.endswith("Model") and "LMHead" not in name for name in names):
        return ModelTask.EMBED
    return ModelTask.EMBED if "Pooling" in kinds else ModelTask.GENERATE


def labels_of(directory: Path) -> tuple[str, ...]:
    """The names of the labels that the head of the model in a directory has; empty: its class has no such head."""
    config = _config_of(directory)
    return _labels(config) if _has_labels(_class_names(config)) else ()


def _config_of(directory: Path) -> Mapping[str, Any]:
    """The contents of config.json; empty where it cannot be read."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _class_names(config: Mapping[str, Any]) -> list[str]:
    classes = config.get("architectures")
    return [str(one) for one in classes] if isinstance(classes, list) else []


def _has_labels(class_names: Sequence[str]) -> bool:
    return bool(class_names) and all(name.endswith("ForSequenceClassification") for name in class_names)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """As transformers reads them: it writes no names where there are two labels without any."""
    named, number = config.get("id2label"), config.get("num_labels")
    if isinstance(named, dict):
        names = [str(named[key]) for key in sorted(named, key=lambda key: int(key) if key.isdecimal() else 0)]
        # Messages have UTF-8, which has no halves of surrogate pairs; JSON has.
        return tuple(name.encode(errors="replace").decode() for name in names)
    return tuple(f"LABEL_{index}" for index in range(number if isinstance(number, int) else 2))
