"""Adds modules `Dense` to a model, as sentence-transformers writes them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def add_dense(directory: Path, inputs: int, outputs: int, *, bias: bool, activation: str) -> None:
    """One with random weights behind the modules that are there."""
    path = directory / "modules.json"
    modules = json.loads(path.read_text()) if path.is_file() else []
    folder = f"{len(modules)}_Dense"
    path.write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense", "path": folder}]))
    (directory / folder).mkdir()
    config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
    (directory / folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(len(modules))
    layer = torch.nn.Linear(inputs, outputs, bias)
    tensors = {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}
    save_file(tensors, directory / folder / "model.safetensors")
