"""The descriptions of models on disk."""

from pathlib import Path
from typing import TypeVar

from worker_svc.model.architecture import describe_any
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.encoder_description import EncoderDescription

D = TypeVar("D", ModelDescription, EncoderDescription)


def description_of(directory: Path, kind: type[D]) -> D:
    """The description of a directory's model, which must be of a kind."""
    description = describe_any(read_config(directory))
    assert isinstance(description, kind)
    return description
