from pathlib import Path

import torch
from safetensors.torch import load_file

from worker_svc.tensor_writer import PlannedTensor, write_tensors


def test_a_file_has_the_tensors_that_were_planned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "a.weight": torch.randn(3, 5),
        "b.weight": torch.randn(7).half(),
        "c.weight": torch.randn(2, 1).bfloat16(),
        "d.blocks": torch.randint(0, 256, (3, 9), dtype=torch.uint8).t(),
    }
    made: list[str] = []

    def planned(name: str) -> PlannedTensor:
        def make() -> torch.Tensor:
            made.append(name)
            return tensors[name]

        return PlannedTensor(tensors[name].dtype, tuple(tensors[name].shape), make)

    write_tensors(tmp_path / "model.safetensors", {name: planned(name) for name in tensors})
    assert made == list(tensors), "each when it is written"
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
