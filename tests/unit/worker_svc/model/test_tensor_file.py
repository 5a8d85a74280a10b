"""Tensors are read without the file's pages, so that loading takes little more memory than the model."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.tensor_file import TensorFile
from worker_svc.model.tensor_names import ExpertRows, OneExpert, StoredTensor
from worker_svc.model.weights import Checkpoint, ReadMeter, open_checkpoint


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


def test_all_numbers_that_safetensors_knows_are_read(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3, 2).to(dtype) for name, dtype in safetensors.torch._TYPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors")
    assert {name: file.read(name).dtype for name in tensors} == safetensors.torch._TYPES


def test_tensors_are_of_the_file_that_was_opened_where_its_name_goes_to_another(tmp_path: Path) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    save_file({"a": torch.ones(100)}, other, metadata={"made": "later"})
    file = TensorFile(path)
    other.rename(path)
    assert not file.read("a").any()


def _checkpoint(directory: Path) -> Checkpoint:
    return Checkpoint(directory, DenseFormat(), torch.float32, torch.device("cpu"))


def test_the_share_that_has_been_read_is_shown(tmp_path: Path) -> None:
    meter = ReadMeter()
    assert meter.share() is None
    tensors = {"a": torch.zeros(30), "experts": torch.zeros(2, 5, 3), "unused": torch.zeros(100)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path, torch.float32, torch.device("cpu"), meter) as checkpoint:
        assert meter.share() == 0
        checkpoint.drop("unused")
        part = StoredTensor("experts", ExpertRows((2, 5, 3), 1, 2, 4))
        checkpoint.rename({"a": StoredTensor("a"), "part": part})
        checkpoint.read("a", 30)
        assert meter.share() == 30 / (30 + 2 * 3)
        checkpoint.read("part", 2, 3)
        assert meter.share() == 1
    assert meter.share() is None


def test_the_part_of_one_expert_is_read_alone(tmp_path: Path) -> None:
    blocks = torch.arange(3 * 4 * 2 * 5).view(3, 4, 2, 5)
    tensors = {"blocks": blocks, "bias": torch.randn(3, 4), "short": torch.ones(2, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = _checkpoint(tmp_path)
    part = OneExpert(3, 1)
    checkpoint.rename({name: StoredTensor(name, part) for name in tensors})
    checkpoint.rename({name: StoredTensor(name) for name in tensors})  # parts stay
    assert checkpoint.share_read == 0
    assert torch.equal(checkpoint.read("blocks", 4, 2, 5), tensors["blocks"][1])
    assert torch.equal(checkpoint.read("bias", 4), tensors["bias"][1])
    with pytest.raises(UnsupportedModel, match=r"the tensor short of .* is \[2, 4\], not \[3, 4\]"):
        checkpoint.read("short", 4)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100_000)}, path)
    checkpoint = _checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UnsupportedModel, match=r"cannot be read: .*model.safetensors ends within the tensor a"):
        checkpoint.read("a", 100_000)


def test_numbers_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    """Of 4 bits, which torch has not."""
    header = b'{"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}} '
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UnsupportedModel, match="the tensor a has numbers of the kind F4, which is not supported"):
        _checkpoint(tmp_path).read("a", 16)
