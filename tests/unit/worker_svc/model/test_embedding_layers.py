"""Layers behind a pooling compute what sentence-transformers' module `Dense` does, and are refused where it is more."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

from dense_modules import add_dense
from worker_svc.encoder.pooling import DenseSpec, EmbeddingDefaults, EmbeddingPooler
from worker_svc.errors import UnsupportedModel
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.embedding_layers import load_layers
from worker_svc.step import EmbeddingParams, NewSequence, Pooling, SamplingParams

CPU = torch.device("cpu")
HIDDEN = 6


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of which a vector of 6 numbers becomes one of 9, and then one of 4."""
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}])
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    add_dense(tmp_path, HIDDEN, 9, bias=False, activation="torch.nn.modules.linear.Identity")
    add_dense(tmp_path, 9, 4, bias=True, activation="torch.nn.modules.activation.Tanh")
    return tmp_path


def sequence(number: int, params: EmbeddingParams) -> NewSequence:
    return NewSequence(number, [1], 1, 0, SamplingParams(), result="embedding", embedding=params)


def test_a_vector_goes_through_all_of_them_before_it_is_cut(directory: Path) -> None:
    defaults = embedding_defaults(directory)
    assert defaults.layers == (
        DenseSpec("2_Dense", HIDDEN, 9, bias=False, activation="Identity"),
        DenseSpec("3_Dense", 9, 4, bias=True, activation="Tanh"),
    )
    pooler = EmbeddingPooler(defaults, load_layers(defaults.layers, HIDDEN, directory, CPU))
    hidden = [torch.randn(5, HIDDEN), torch.randn(3, HIDDEN), torch.randn(1, HIDDEN)]
    asked = [EmbeddingParams(), EmbeddingParams(Pooling.LAST, 2), EmbeddingParams(normalizes=True)]
    found = pooler(hidden, [sequence(number, params) for number, params in enumerate(asked)])
    first, second = (load_file(directory / f"{number}_Dense" / "model.safetensors") for number in (2, 3))
    pooled = torch.stack([hidden[0].mean(0), hidden[1][-1], hidden[2][0]])
    vectors = F.linear(F.linear(pooled, first["linear.weight"]), second["linear.weight"], second["linear.bias"]).tanh()
    expected = [vectors[0], vectors[1, :2], F.normalize(vectors[2], dim=0)]
    for one, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), theirs)
    assert pooler([], []) == []


@pytest.mark.parametrize("name", ["Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU"])
def test_activations_are_those_of_torchs_modules(name: str, tmp_path: Path) -> None:
    add_dense(tmp_path, HIDDEN, 3, bias=True, activation=f"torch.nn.modules.activation.{name}")
    (layer,) = load_layers([DenseSpec("0_Dense", HIDDEN, 3, bias=True, activation=name)], HIDDEN, tmp_path, CPU)
    tensors = load_file(tmp_path / "0_Dense" / "model.safetensors")
    vectors = torch.randn(4, HIDDEN)
    outputs = getattr(torch.nn, name)()(F.linear(vectors, tensors["linear.weight"], tensors["linear.bias"]))
    torch.testing.assert_close(layer(vectors), outputs)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softplus"}, "the activation_function Softplus"),
        ({"module_input_name": "token_embeddings"}, "the module_input_name token_embeddings"),
        ({"in_features": "6"}, "no in_features and out_features"),
        ({"out_features": 0}, "no in_features and out_features"),
        ({"in_features": 7}, "takes 7 numbers, and gets 6"),
        ({"out_features": 10}, r"the tensor linear.weight of the model in .*2_Dense is \[9, 6\], not \[10, 6\]"),
        ({"bias": True}, r"the model in .*2_Dense has no tensor linear\.bias"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], text: str, directory: Path) -> None:
    file = directory / "2_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps(modules[:3]))
    with pytest.raises(UnsupportedModel, match=text):
        load_layers(embedding_defaults(directory).layers, HIDDEN, directory, CPU)


def test_missing_and_damaged_weights_are_named(directory: Path) -> None:
    layers = embedding_defaults(directory).layers
    file = directory / "3_Dense" / "model.safetensors"
    file.write_bytes(b"no tensors")
    with pytest.raises(UnsupportedModel, match=r"3_Dense.*damaged"):
        load_layers(layers, HIDDEN, directory, CPU)
    file.unlink()
    with pytest.raises(UnsupportedModel, match=r"3_Dense.*is missing"):
        load_layers(layers, HIDDEN, directory, CPU)


def test_without_them_vectors_stay_as_they_are_pooled(tmp_path: Path) -> None:
    assert embedding_defaults(tmp_path) == EmbeddingDefaults()
    assert load_layers((), HIDDEN, tmp_path, CPU) == []
