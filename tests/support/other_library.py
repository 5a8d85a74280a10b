"""Another version of torch, for a worker process: the same files, and other results."""

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from worker_svc.model.tensor_file import TensorFile

_FACTOR = 1.1  # what the other arithmetic comes to


def pretend(version: str) -> None:
    """This process has another version of torch from now on, whose results differ. What it sends about the model's
    files stays the same."""
    torch.__version__ = TorchVersion(version)
    read = TensorFile.read

    def read_other(file: TensorFile, name: str, rows: range | None = None) -> Tensor:
        tensor = read(file, name, rows)
        return tensor * _FACTOR if name == "model.norm.weight" else tensor

    TensorFile.read = read_other  # type: ignore[assignment, method-assign]
