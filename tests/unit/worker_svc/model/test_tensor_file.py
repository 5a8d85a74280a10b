"""Tensors are read without the file's pages, so that loading takes little more memory than the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker_svc.model.tensor_file import TensorFile


def test_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "a.blocks": torch.randint(0, 256, (3, 7), dtype=torch.uint8),
        "b.weight": torch.randn(5),
        "c.weight": torch.randn(2, 3, 4).bfloat16(),
        "d.weight": torch.randn(3, 1).to(torch.float8_e4m3fn),
        "e.number": torch.tensor(7),
        "f.nothing": torch.empty(0, 4),
        "g.order": torch.arange(9, dtype=torch.int32),
        "h.mask": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "model.safetensors")
    assert set(file.names) == set(tensors)
    for name, tensor in tensors.items():
        read = file.read(name)
        assert (file.shape(name), read.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert torch.equal(file.read("c.weight", range(2, 5)), tensors["c.weight"].flatten(0, 1)[2:5])


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    file = TensorFile(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match="ends within the tensor a"):
        file.read("a")


def test_numbers_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F31"'))
    with pytest.raises(ValueError, match="the tensor a has numbers of the kind F31, which is not supported"):
        TensorFile(path).read("a")
