"""Adapters in a model's directory (PEFT's files). They are rejected, because ignoring them would change every
answer.
"""

import json
from pathlib import Path

from worker_svc.errors import UnsupportedModel

_CONFIG = "adapter_config.json"


def refuse_adapters(directory: Path) -> None:
    """Raises UnsupportedModel if a model directory has an adapter, whatever its config says."""
    path = directory / _CONFIG
    if path.is_file():
        raise UnsupportedModel(f"{path} is the config of {_named(path)}, and adapters are not served")


def _named(path: Path) -> str:
    """The adapter's kind and base model, as far as they can be read."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return "an adapter"
    fields = config if isinstance(config, dict) else {}
    kind, base = fields.get("peft_type"), fields.get("base_model_name_or_path")
    named = f"an adapter ({kind.lower()})" if isinstance(kind, str) and kind else "an adapter"
    return f"{named} of {base}" if isinstance(base, str) and base else named
