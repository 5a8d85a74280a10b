"""The files of a model and its served name. Imports neither torch nor transformers."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

DEFAULT_MODEL = "smollm2-135m-instruct"

# Patterns of the files that are downloaded from a hub repository: no pickled weights and no code.
CONFIG_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""Configuration and tokenizer: all that gateways read."""
WEIGHT_FILES = ("*.safetensors",)
TEMPLATE_FOLDER = "additional_chat_templates"
"""The folder, as transformers names it, of chat templates beside chat_template.jinja."""

T = TypeVar("T")

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


_GGUF_HEADER_BYTES = 24
"""The magic number, the version, and the numbers of tensors and of pieces of metadata."""


class ModelNotFound(Exception):  # noqa: N818
    """The model's files are missing. The text says what to do."""


class DamagedModelFile(ModelNotFound):
    """A file of the model is not what it should be. The text names it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to load: `path` holds config.json, tokenizer.json and, for workers, safetensors weights."""

    name: str
    path: Path
    other_tokenizer: Path | None = None
    """Directory of a tokenizer that replaces the model's own."""
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""

    @property
    def tokenizer_path(self) -> Path:
        """The directory of the tokenizer."""
        return self.other_tokenizer or self.path


class SourceKind(Enum):
    """The kinds of QUIRE_MODEL."""

    DEFAULT = auto()
    DIRECTORY = auto()
    GGUF = auto()
    HUB = auto()


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: `origin` is a path or a hub id, `name` its served name.

    `revision` is the branch, tag or commit of a hub id; None: its main branch. Without weights only the configuration
    and the tokenizer are meant.
    """

    kind: SourceKind
    name: str
    origin: str
    revision: str | None = None
    with_weights: bool = True

    def __str__(self) -> str:
        return self.origin if self.revision is None else f"{self.origin} at revision {self.revision}"

    @property
    def hub_files(self) -> tuple[str, ...]:
        """Patterns of the files that are needed from the hub."""
        return (*CONFIG_FILES, *WEIGHT_FILES) if self.with_weights else CONFIG_FILES

    def why_not_pinned(self) -> str:
        """Says of a hub id without a revision that it follows a branch; empty for what else there is."""
        if self.kind is not SourceKind.HUB or self.revision is not None:
            return ""
        directory = self.directory()
        now = f"; it is at {directory.name} now" if directory is not None else ""
        return f"{self} follows its main branch, which may change{now}"

    def directory(self) -> Path | None:
        """The directory that the model is loaded from, whether or not it exists; None for a hub id not in the cache."""
        match self.kind:
            case SourceKind.DEFAULT:
                complete = cache_directory() / self.name
                return complete if self.with_weights or complete.is_dir() else cache_root() / "tokenizers" / self.name
            case SourceKind.DIRECTORY:
                return Path(self.origin)
            case SourceKind.GGUF:
                return _gguf_directory(Path(self.origin))
            case SourceKind.HUB:
                return _hub_directory(self)


def resolve_model(
    model: str | None,
    revision: str | None = None,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
    served_names: Sequence[str] = (),
    *,
    with_weights: bool = True,
) -> ServedModel:
    """Finds a model by its directory, its GGUF file, its hub id, or the default one where `model` is None.

    A `tokenizer` is found in the same way; None: the model's own. `served_names` are the model's name and its aliases;
    empty: the name follows from its source. Gateways need no weights. Raises ModelNotFound where files are missing, or
    must be downloaded or converted first.
    """
    source = replace(find_source(model, revision), with_weights=with_weights)
    name, *aliases = served_names or (source.name,)
    other = find_tokenizer(model, revision, tokenizer, tokenizer_revision)
    path, tokenizer_path = source.directory(), other.directory() if other else None
    needs_worker = with_weights or SourceKind.GGUF in (source.kind, other and other.kind)
    command = _prepare_command(needs_worker, model, revision, tokenizer, tokenizer_revision)
    if path is None or not path.is_dir():
        raise ModelNotFound(f"the model {source} is not prepared yet: run `{command}` first")
    if other is None:
        check_model_files(path, with_weights=with_weights)
        return ServedModel(name, path, aliases=tuple(aliases))
    if tokenizer_path is None or not tokenizer_path.is_dir():
        raise ModelNotFound(f"the tokenizer {other} is not prepared yet: run `{command}` first")
    check_model_files(path, with_tokenizer=False, with_weights=with_weights)
    check_tokenizer_files(tokenizer_path, tokenizer_setting(tokenizer))
    return ServedModel(name, path, tokenizer_path, tuple(aliases))


def _prepare_command(
    needs_worker: bool, model: str | None, revision: str | None, tokenizer: str | None, tokenizer_revision: str | None
) -> str:
    """The shell command that prepares a model for workers, or for gateways only."""
    words = ["worker_svc.prepare", *([model] if model else [])] if needs_worker else ["gateway_svc.prepare"]
    flags = {} if needs_worker else {"model": model}
    flags |= {"revision": revision, "tokenizer": tokenizer, "tokenizer-revision": tokenizer_revision}
    words += [word for flag, value in flags.items() if value for word in (f"--{flag}", value)]
    return shlex.join(["python", "-m", *words])


def split_names(names: str) -> tuple[str, ...]:
    """The names in QUIRE_SERVED_MODEL_NAME. Raises ValueError."""
    return check_names([name.strip() for name in names.split(",")]) if names else ()


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names under which a model may be served. Raises ValueError for an invalid or duplicate name."""
    for index, name in enumerate(names):
        if not _HUB_ID.fullmatch(name):
            allowed = "letters, digits, '_', '-' and '.', and one '/' at most, as a hub id has them"
            raise ValueError(f"{name!r} is not a name for a model: {allowed}")
        if name in names[:index]:
            raise ValueError(f"{name} is a duplicate")
    return tuple(names)


def tokenizer_setting(tokenizer: str | None) -> str:
    """The variable that named the tokenizer, where `tokenizer` is QUIRE_TOKENIZER."""
    return "QUIRE_TOKENIZER" if tokenizer else "QUIRE_TOKENIZER_REVISION"


def find_tokenizer(
    model: str | None, revision: str | None, tokenizer: str | None, tokenizer_revision: str | None
) -> ModelSource | None:
    """The source of a tokenizer by its settings; None: the model's own. Raises ModelNotFound.

    The revision of the model's own tokenizer is the model's, unless `tokenizer_revision` is another one.
    """
    if tokenizer and tokenizer != model:
        try:
            source = find_source(tokenizer)
        except ModelNotFound as error:
            raise ModelNotFound(f"QUIRE_TOKENIZER: {error}") from None
    elif tokenizer_revision and tokenizer_revision != revision:
        source = find_source(model)
    else:
        return None
    source = replace(source, with_weights=False)
    return _at_revision(source, tokenizer_revision, "QUIRE_TOKENIZER_REVISION")


def find_source(model: str | None, revision: str | None = None) -> ModelSource:
    """The source that `model` names. Raises ModelNotFound where it is neither a file, nor a directory, nor a hub id."""
    return _at_revision(_find(model), revision, "QUIRE_REVISION")


def _at_revision(source: ModelSource, revision: str | None, setting: str) -> ModelSource:
    if not revision:
        return source
    if source.kind is not SourceKind.HUB:
        raise ModelNotFound(f"{setting} is {revision}, and {source} is not a hub id: only these have revisions")
    return replace(source, revision=revision)


def _find(model: str | None) -> ModelSource:
    if not model or (model == DEFAULT_MODEL and not Path(model).exists()):
        return ModelSource(SourceKind.DEFAULT, DEFAULT_MODEL, DEFAULT_MODEL)
    path = Path(model).expanduser().resolve()
    if path.is_dir():
        return ModelSource(SourceKind.DIRECTORY, path.name, str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{model} is neither a model directory nor a GGUF file")
        _check_gguf(path)
        return ModelSource(SourceKind.GGUF, path.stem, str(path))
    if not is_hub_id(model):
        raise ModelNotFound(f"there is no model at {model}")
    return ModelSource(SourceKind.HUB, model, model)


def _check_gguf(path: Path) -> None:
    """Raises DamagedModelFile for a file without the header of a GGUF file."""
    try:
        with path.open("rb") as file:
            header = file.read(_GGUF_HEADER_BYTES)
    except OSError as error:
        raise DamagedModelFile(f"{path} cannot be read: {error.strerror}") from error
    if not header.startswith(b"GGUF") or len(header) < _GGUF_HEADER_BYTES:
        raise DamagedModelFile(f"{path} is not a GGUF file: it has no header of one")


def is_hub_id(model: str) -> bool:
    """Whether a text has the form of a hub id."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def cache_root() -> Path:
    """The directory of cached files: $QUIRE_CACHE_DIR, or below the user's cache."""
    root = os.environ.get("QUIRE_CACHE_DIR")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "quire"


def cache_directory() -> Path:
    """The directory of prepared models."""
    return cache_root() / "models"


def check_model_files(path: Path, *, with_tokenizer: bool = True, with_weights: bool = True) -> None:
    """Raises ModelNotFound, naming what is missing, unless a model can be loaded from the directory."""
    needed = ("config.json", "tokenizer.json") if with_tokenizer else ("config.json",)
    missing = [name for name in needed if not (path / name).is_file()]
    if with_weights and not any((path / name).is_file() for name in _WEIGHTS):
        missing.append("model.safetensors")
    if missing:
        raise ModelNotFound(f"{path} is not a model directory: it has no {', no '.join(missing)}")


def check_tokenizer_files(path: Path, setting: str = "QUIRE_TOKENIZER") -> None:
    """Raises ModelNotFound, naming the setting that led there, unless a tokenizer can be loaded from the directory."""
    if not (path / "tokenizer.json").is_file():
        raise ModelNotFound(f"{setting}: {path} is not a tokenizer directory: it has no tokenizer.json")


def tokenizer_fingerprint(path: Path) -> bytes:
    """SHA-256 over the tokenizer's file in its directory: equal fingerprints tokenize equally."""
    return hashlib.sha256((path / "tokenizer.json").read_bytes()).digest()


def eos_token_ids_of(directory: Path) -> list[int]:
    """End-of-text tokens: all of them from generation_config.json, else the one in config.json, of a model that also
    takes images the one of its text model.

    Raises DamagedModelFile, and ValueError for what is no token.
    """
    for name in ("generation_config.json", "config.json"):
        config = read_json(directory / name, dict[str, Any]())
        eos, text = config.get("eos_token_id"), config.get("text_config")
        if eos is None and isinstance(text, dict):
            eos = text.get("eos_token_id")
        if eos is None:
            continue
        tokens = eos if isinstance(eos, list) else [eos]
        if not all(type(token) is int and token < 2**32 for token in tokens):
            raise ValueError(f"eos_token_id of {name} must be a token or a list of tokens, not {eos!r}")
        return [token for token in tokens if token >= 0]  # -1 stands for none
    return []


def read_json(path: Path, default: T) -> T:
    """A JSON file of a model, of the type of `default`, which stands for a file that is missing. Raises
    DamagedModelFile.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedModelFile(f"{path} cannot be read: {error}") from error
    if not isinstance(value, type(default)):
        raise DamagedModelFile(f"{path} must be {'a list' if isinstance(default, list) else 'an object'}")
    return value


def read_modules(directory: Path) -> list[dict[str, Any]]:
    """The modules of a model, as sentence-transformers writes them; none without its modules.json. Raises
    DamagedModelFile.
    """
    path = directory / "modules.json"
    modules: list[Any] = read_json(path, [])
    if not all(isinstance(module, dict) for module in modules):
        raise DamagedModelFile(f"{path} is not a list of objects, as sentence-transformers writes it")
    return modules


def module_kind(module: Mapping[str, Any]) -> str:
    """The class of a module, without the Python module that has it."""
    return str(module.get("type", "")).rpartition(".")[2]


def _gguf_directory(path: Path) -> Path:
    # A new file at the same path is another model. "native": earlier releases dequantized files of some architectures.
    stat = path.stat()
    identity = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0native".encode()).hexdigest()
    return cache_directory() / f"{path.stem}-{identity[:12]}"


def _hub_directory(source: ModelSource) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    files = list(source.hub_files)
    try:
        return Path(
            snapshot_download(source.origin, revision=source.revision, local_files_only=True, allow_patterns=files)
        )
    except LocalEntryNotFoundError:
        return None
