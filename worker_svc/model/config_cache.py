"""The config of a native model, kept over starts: transformers, which reads it, takes seconds to import."""

import json
import os
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from svc_common.models import cache_root
from worker_svc.model import config as config_module
from worker_svc.model.config import ModelConfig, RopeConfig, RopeKind, native_config, read_config


def load_native_config(directory: Path) -> ModelConfig | None:
    """What the native modules need to know of the model in a directory; None: they do not compute it.

    Raises UnsupportedModel where nothing does.
    """
    cached = cache_root() / "configs" / f"{_cache_key(directory)}.json"
    if cached.is_file():
        return _from_json(cached.read_text())
    config = native_config(read_config(directory))
    if config is not None:
        with suppress(OSError):  # a cache that cannot be written costs the next start its seconds, no more
            cached.parent.mkdir(parents=True, exist_ok=True)
            unfinished = cached.with_suffix(f".{os.getpid()}")
            unfinished.write_text(_to_json(config))
            unfinished.replace(cached)  # whole or not at all, whoever else starts now
    return config


def _cache_key(directory: Path) -> str:
    """Changes with anything that the config comes of."""
    digest = sha256((directory / "config.json").read_bytes())
    digest.update(version("transformers").encode())
    digest.update(Path(config_module.__file__).read_bytes())
    return digest.hexdigest()


def _to_json(config: ModelConfig) -> str:
    fields = asdict(config)
    fields["rope"]["kind"] = config.rope.kind.value
    return json.dumps(fields)


def _from_json(text: str) -> ModelConfig:
    fields = json.loads(text)
    rope = fields.pop("rope")
    kind = RopeKind(rope.pop("kind"))
    return ModelConfig(**{**fields, "windows": tuple(fields["windows"]), "rope": RopeConfig(kind=kind, **rope)})
