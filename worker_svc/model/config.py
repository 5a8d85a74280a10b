"""A model's config.json, as it stands and as transformers completes it."""

import json
from pathlib import Path
from typing import Any

from worker_svc.errors import StartupFailed


class UnsupportedModel(StartupFailed):
    """A model that cannot be served. The text is for the operator and says what can."""


def raw_config(directory: Path) -> dict[str, Any]:
    """The content of config.json."""
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return raw


def read_config(directory: Path) -> Any:
    """The config of the model in a directory, with all that config.json leaves out, as transformers has it.

    Raises UnsupportedModel where transformers does not know the architecture.
    """
    raw = raw_config(directory)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (KeyError, ValueError) as error:
        named = ", ".join(raw.get("architectures") or [raw.get("model_type") or "unknown"])
        raise UnsupportedModel(
            f"the model in {directory} is of the architecture {named}, which the installed transformers does not know"
        ) from error
