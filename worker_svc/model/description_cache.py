"""Descriptions of models, cached between starts: transformers, which completes configs, takes seconds to import."""

import os
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from svc_common.models import cache_root
from worker_svc.model.architecture import AnyDescription, describe_any, origin_of, source_of
from worker_svc.model.config import model_types, raw_config, read_config
from worker_svc.model.description import ModelDescription

_JSON: TypeAdapter[AnyDescription] = TypeAdapter(AnyDescription)


def description_of(directory: Path) -> ModelDescription | None:
    """The description of the decoder in a directory; None: only transformers' own modules may compute it, or it is an
    encoder. Raises StartupFailed if nothing can.
    """
    description = any_description_of(directory)
    return description if isinstance(description, ModelDescription) else None


def any_description_of(directory: Path) -> AnyDescription | None:
    """The description of the model in a directory; None: only transformers' own modules may compute it.

    Raises StartupFailed if nothing can.
    """
    cached = cache_root() / "descriptions" / f"{_origin(directory)}.json"
    with suppress(OSError, ValidationError):  # missing or damaged: described and written again
        return _JSON.validate_json(cached.read_bytes())
    description = describe_any(read_config(directory))
    if description is not None:
        with suppress(OSError):  # a cache that cannot be written only makes the next start slower
            cached.parent.mkdir(parents=True, exist_ok=True)
            unfinished = cached.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(_JSON.dump_json(description))
            unfinished.replace(cached)  # atomic, also if other workers start
    return description


def _origin(directory: Path) -> str:
    """Changes with everything that the description depends on."""
    digest = sha256((directory / "config.json").read_bytes())
    digest.update(version("transformers").encode())
    package = Path(__file__).parent
    # All architectures of Quire's own: one may be that of a text model which config.json does not name.
    described_by = ("describe_*.py", "*description.py", "architecture.py", "architectures/*.py")
    for source in sorted(path for pattern in described_by for path in package.glob(pattern)):
        digest.update(source.read_bytes())
    for model_type in model_types(raw_config(directory)):
        # Its source may use other files of its package.
        digest.update(origin_of(model_type).encode())
        digest.update(source_of(model_type))
    return digest.hexdigest()
