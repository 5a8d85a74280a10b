"""Where a model's files are and under which name it is served. Imports neither torch nor transformers."""

import hashlib
import os
import re
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"

# What is taken of a hub repository: neither pickled weights nor code.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class ModelNotFound(Exception):  # noqa: N818
    """The model is not there. The text is for the operator and says what to do."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to load: `path` holds config.json, tokenizer.json and safetensors weights."""

    name: str
    path: Path


class SourceKind(Enum):
    """What QUIRE_MODEL names."""

    DEFAULT = auto()
    DIRECTORY = auto()
    GGUF = auto()
    HUB = auto()


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: `origin` is a path or a hub id, `name` is what clients call it."""

    kind: SourceKind
    name: str
    origin: str

    def directory(self) -> Path | None:
        """The directory that the model is loaded from, there already or not; None for a hub id not in the cache."""
        match self.kind:
            case SourceKind.DEFAULT:
                return cache_directory() / self.name
            case SourceKind.DIRECTORY:
                return Path(self.origin)
            case SourceKind.GGUF:
                return _gguf_directory(Path(self.origin))
            case SourceKind.HUB:
                return _hub_directory(self.origin)


def resolve_model(model: str | None) -> ServedModel:
    """Finds a model by its directory, its GGUF file, its hub id, or the default one where `model` is None.

    Nothing is downloaded or converted: where that is due, or files are missing, raises ModelNotFound.
    """
    source = find_source(model)
    path = source.directory()
    if path is None or not path.is_dir():
        command = "python -m worker_svc.prepare" + (f" {model}" if model else "")
        raise ModelNotFound(f"the model {source.name} is not prepared yet: run `{command}` first")
    check_model_files(path)
    return ServedModel(source.name, path)


def find_source(model: str | None) -> ModelSource:
    """What `model` names. Raises ModelNotFound where it can be neither a file, nor a directory, nor a hub id."""
    if not model or (model == DEFAULT_MODEL and not Path(model).exists()):
        return ModelSource(SourceKind.DEFAULT, DEFAULT_MODEL, DEFAULT_MODEL)
    path = Path(model).expanduser().resolve()
    if path.is_dir():
        return ModelSource(SourceKind.DIRECTORY, path.name, str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{model} is neither a model directory nor a GGUF file")
        return ModelSource(SourceKind.GGUF, path.stem, str(path))
    if not _HUB_ID.fullmatch(model) or model.endswith(".gguf"):
        raise ModelNotFound(f"there is no model at {model}")
    return ModelSource(SourceKind.HUB, model, model)


def cache_root() -> Path:
    """Where all that can be made anew is kept: $QUIRE_CACHE_DIR, or below the user's cache."""
    root = os.environ.get("QUIRE_CACHE_DIR")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "quire"


def cache_directory() -> Path:
    """Where prepared models are kept."""
    return cache_root() / "models"


def check_model_files(path: Path) -> None:
    """Raises ModelNotFound, naming what is missing, unless a model can be loaded from the directory."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any((path / name).is_file() for name in _WEIGHTS):
        missing.append("model.safetensors")
    if missing:
        raise ModelNotFound(f"{path} is not a model directory: it has no {', no '.join(missing)}")


def tokenizer_fingerprint(path: Path) -> bytes:
    """SHA-256 over the tokenizer's file in a model directory: where it is equal, texts become the same tokens."""
    return hashlib.sha256((path / "tokenizer.json").read_bytes()).digest()


def _gguf_directory(path: Path) -> Path:
    # Another file of the same name, or a newer one in the same place, is another model.
    stat = path.stat()
    identity = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    return cache_directory() / f"{path.stem}-{identity[:12]}"


def _hub_directory(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=list(HUB_FILES)))
    except LocalEntryNotFoundError:
        return None
