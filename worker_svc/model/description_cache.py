"""The descriptions of models, kept over starts: transformers, which completes configs, takes seconds to import."""

import os
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from svc_common.models import cache_root
from worker_svc.model import describe_decoder
from worker_svc.model import description as description_module
from worker_svc.model.architecture import architecture_of, describe, origin_of
from worker_svc.model.config import raw_config, read_config
from worker_svc.model.description import ModelDescription

_JSON = TypeAdapter(ModelDescription)


def description_of(directory: Path) -> ModelDescription | None:
    """The description of the model in a directory; None: only transformers' own modules may compute it.

    Raises StartupFailed where nothing does.
    """
    cached = cache_root() / "descriptions" / f"{_origin(directory)}.json"
    with suppress(OSError, ValidationError):  # what is not there or is damaged is described, and written, anew
        return _JSON.validate_json(cached.read_bytes())
    description = describe(read_config(directory))
    if description is not None:
        with suppress(OSError):  # a cache that cannot be written costs the next start its seconds, no more
            cached.parent.mkdir(parents=True, exist_ok=True)
            unfinished = cached.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(_JSON.dump_json(description))
            unfinished.replace(cached)  # whole or not at all, whoever else starts now
    return description


def _origin(directory: Path) -> str:
    """Changes with anything that the description comes of."""
    digest = sha256((directory / "config.json").read_bytes())
    digest.update(version("transformers").encode())
    sources = [description_module.__file__, describe_decoder.__file__]
    # Also of other packages; importing it is what lets transformers know a config of theirs.
    model_type = str(raw_config(directory).get("model_type"))
    architecture = architecture_of(model_type)
    if architecture is not None:
        sources.append(architecture.source)
        # Their source may use other files of their package.
        digest.update(origin_of(model_type).encode())
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()
