"""The linear layers that change a pooled vector: the modules `Dense` of sentence-transformers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.encoder.pooling import DenseSpec
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.sentence_files import module_config, module_folder
from worker_svc.model.weights import Checkpoint

_VECTOR = "sentence_embedding"
# By the names of torch's modules
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda outputs: outputs,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": F.silu,
}


class DenseLayer:
    """A layer's weights, in float32 as pooled vectors are."""

    def __init__(self, spec: DenseSpec, directory: Path, device: torch.device) -> None:
        """Raises UnsupportedModel if its file is missing, lacks tensors or has others."""
        path = weights_of(spec, directory)
        if not path.is_file():
            raise UnsupportedModel(f"{path}, a layer behind the pooling, is missing")
        checkpoint = Checkpoint(path.parent, DenseFormat(), torch.float32, device)
        self._weight = checkpoint.take("linear.weight", spec.outputs, spec.inputs)
        self._bias = checkpoint.take("linear.bias", spec.outputs) if spec.bias else None
        checkpoint.check_all_taken()
        self._activate = _ACTIVATIONS[spec.activation]

    def __call__(self, vectors: Tensor) -> Tensor:
        """What becomes of vectors [num_prompts, inputs]: [num_prompts, outputs]."""
        return self._activate(F.linear(vectors, self._weight, self._bias))


def dense_spec(directory: Path, module: Mapping[str, Any]) -> DenseSpec:
    """A `Dense` of modules.json. Raises UnsupportedModel where its config names what is not computed here, and
    DamagedModelFile."""
    config = module_config(directory, module)
    folder = module_folder(directory, module)
    where = directory / folder / "config.json"
    for name in ("module_input_name", "module_output_name"):
        if config.get(name, _VECTOR) != _VECTOR:
            raise UnsupportedModel(f"{where} has the {name} {config[name]}; only {_VECTOR} is supported")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"{where} has the activation_function {activation}; known are {', '.join(_ACTIVATIONS)}")
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if not (isinstance(inputs, int) and isinstance(outputs, int) and min(inputs, outputs) > 0):
        raise UnsupportedModel(f"{where} has no in_features and out_features")
    return DenseSpec(str(folder), inputs, outputs, config.get("bias", True) is not False, activation)


def weights_of(spec: DenseSpec, directory: Path) -> Path:
    """The file of a layer's weights."""
    return directory / spec.folder / "model.safetensors"


def load_layers(
    layers: Sequence[DenseSpec], hidden_size: int, directory: Path, device: torch.device
) -> list[DenseLayer]:
    """Loads the layers behind the pooling of a model with vectors of `hidden_size`.

    Raises UnsupportedModel as they do, and where a layer's inputs are not what comes before it.
    """
    width = hidden_size
    for layer in layers:
        if layer.inputs != width:
            raise UnsupportedModel(
                f"the layer {layer.folder} in {directory} takes {layer.inputs} numbers, and gets {width}"
            )
        width = layer.outputs
    return [DenseLayer(layer, directory, device) for layer in layers]
