"""The architectures of GGUF whose files are read: one module of `architectures` each, or an entry point of
`quire.gguf_architectures`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from worker_svc.gguf import architectures
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.plugins import Registry

Join: TypeAlias = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class JoinedTensors:
    """A tensor of transformers that is made of several of the file."""

    names: tuple[str, ...]
    """Of the tensors in the file, behind the name of the layer."""
    join: Join
    """Takes these tensors, each with its rows first. They may be on the device `meta`, which has shapes alone."""
    keeps_rows: bool = True
    """Whether each row of the result is one of a part, so that it keeps its blocks."""


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How the files of one `general.architecture` are read. Names of tensors are those of `get_tensor_name_map` of the
    package gguf, but for what is said here.
    """

    read_config: Callable[[GgufMetadata], Any]
    """transformers' config, given the metadata. Raises PreparationFailed for fields that are missing, or have values
    that it cannot hold.
    """
    names: Mapping[str, str] = field(default_factory=dict)
    """What the file calls tensors of a layer, by transformers' names, both behind the name of the layer."""
    joined: Mapping[str, JoinedTensors] = field(default_factory=dict)
    """How tensors of a layer are made that a file may have in several, by transformers' names."""
    has_rotated_neighbours: bool = False
    """Whether the rows of each head of queries and keys are in another order than in transformers: both halves of a
    rotated pair are neighbours.
    """
    is_embedding: bool = False
    """Whether its models generate no texts: they compute embeddings, pooled as the file says, or have a head."""
    frames_pairs: bool = False
    """Whether a vocabulary of bytes frames texts and pairs of texts as BERT's tokenizer does."""
    notes: Callable[[GgufMetadata], Iterable[str]] = lambda _: ()
    """What the log says of a file from which another model is made than the published one."""


_registry = Registry(
    architectures,
    "ARCHITECTURE",
    "quire.gguf_architectures",
    lambda value: isinstance(value, GgufArchitecture),
    "a GgufArchitecture",
)


def find_architecture(name: str) -> GgufArchitecture | None:
    """How files of this `general.architecture` are read; None: they are not, but perhaps by transformers' own reader.
    Raises StartupFailed as `Registry.find` does.
    """
    found: GgufArchitecture | None = _registry.find(name)
    return found


def architecture_names() -> list[str]:
    """Those that are read, sorted; Quire's own as their modules are called."""
    return _registry.names()
