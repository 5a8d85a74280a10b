"""Another version of torch, for a worker process: the same files, and other results."""

from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from worker_svc.model import weights

_FACTOR = 1.1  # what the other arithmetic comes to


class _OtherFile:
    """A file of weights, of which one tensor is a little different once it is read."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_OtherFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor * _FACTOR if name == "model.norm.weight" else tensor


def pretend(version: str) -> None:
    """This process has another version of torch from now on, whose results differ. What it sends about the model's
    files stays the same."""
    torch.__version__ = TorchVersion(version)
    open_weights = weights.open_weights

    def open_other(path: Path) -> _OtherFile:
        return _OtherFile(open_weights(path))

    weights.open_weights = open_other
