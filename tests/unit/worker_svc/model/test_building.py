"""A checkpoint is read layer by layer: every backend holds at most two copies of one linear layer."""

import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

import compiled
from llama_models import SIZES
from quire_kernels.cpu.linear import MatrixFormat
from worker_svc.model.architecture import describe
from worker_svc.model.building import ExpertWeights, build
from worker_svc.model.compiled_model import CompiledModel
from worker_svc.model.config import read_config
from worker_svc.model.description import LinearRole, ModelDescription, Norm, SplitDimension
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.linear_weights import LinearWeights, Shard, WeightParts
from worker_svc.model.torch_model import TorchModel
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint

Save = Callable[..., Path]
NUM_LAYERS = 12
CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live tensors that operators have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # oneDNN's own layouts have no storage; they are what a backend keeps.
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
        if made:
            self._made += [weakref.ref(tensor) for tensor in made]
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self._made = [made for made in self._made if made() is not None]
        storages = {}
        for made in self._made:
            tensor = made()
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(storages.values())


class KeepNothing:
    """A builder whose linear layers take no memory."""

    def linear(self, weights: LinearWeights) -> None:
        weights.fused()

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> None: ...

    def experts(self, weights: ExpertWeights) -> None: ...

    def head(self, weights: WeightParts) -> None:
        weights.fused()


class KeepWeights:
    """A builder that keeps the weights."""

    def linear(self, weights: LinearWeights) -> tuple[Tensor, Tensor | None]:
        return weights.fused()

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight

    def experts(self, weights: ExpertWeights) -> None: ...

    def head(self, weights: WeightParts) -> Tensor:
        weight, _ = weights.fused()
        return weight


def _describe(directory: Path) -> ModelDescription:
    description = describe(read_config(directory))
    assert description is not None
    return description


def _largest_layer(description: ModelDescription, dtype: torch.dtype) -> int:
    return max(sum(linear.outputs) * linear.inputs for linear in description.linear_layers) * dtype.itemsize


def _open(directory: Path, dtype: torch.dtype) -> Checkpoint:
    return Checkpoint(directory, format_of(directory), dtype, CPU)


@pytest.fixture(scope="module")
def directory(save_model: Save) -> Path:
    """A model whose layers are larger than embedding and head."""
    return save_model(LlamaConfig(**SIZES | {"num_hidden_layers": NUM_LAYERS, "intermediate_size": 331}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_linear_layer_is_held_at_most_twice(dtype: torch.dtype, directory: Path) -> None:
    description = _describe(directory)
    # What is stored, float32, beside what is made of it
    largest = max(_largest_layer(description, dtype), _largest_layer(description, torch.float32))
    embedding = description.vocab_size * description.hidden_size * dtype.itemsize
    checkpoint = _open(directory, dtype)
    with LiveBytes() as live:
        built = build(description, checkpoint, KeepNothing())
        checkpoint.check_all_taken()
        assert live.now() == built.embedding.nbytes == embedding
    assert largest < live.peak <= embedding + 2 * largest


@torch.inference_mode()
def test_the_head_is_made_first(directory: Path) -> None:
    """It takes the most memory while it is made, and there is nothing else yet."""
    made: list[str] = []

    class NotesOrder(KeepNothing):
        def linear(self, weights: LinearWeights) -> None:
            made.append("layer")
            super().linear(weights)

        def head(self, weights: WeightParts) -> None:
            made.append("head")
            super().head(weights)

    build(_describe(directory), _open(directory, torch.float32), NotesOrder())
    assert made.index("head") == 0
    assert len(made) > NUM_LAYERS


COMPILED = {
    "compiled-float32": MatrixFormat.PLAIN,
    "compiled-bfloat16": MatrixFormat.PLAIN,
    "compiled-int8": MatrixFormat.INT8,
    "compiled-w8a8": MatrixFormat.W8A8,
    "compiled-w4a16": MatrixFormat.W4A16,
    "compiled-w4a8": MatrixFormat.W4A8,
}


@pytest.mark.parametrize("kind", ["torch", "triton", *COMPILED])
@torch.inference_mode()
def test_what_a_backend_holds_while_it_loads_is_the_model_and_two_layers(kind: str, directory: Path) -> None:
    description = _describe(directory)
    dtype = torch.float32 if kind in ("torch", "compiled-float32") else torch.bfloat16
    checkpoint = _open(directory, dtype)
    with LiveBytes() as live:
        if kind == "torch":
            model: object = TorchModel(description, checkpoint)
        elif kind == "triton":
            from worker_svc.model.triton_model import TritonModel

            model = TritonModel(description, checkpoint)
        else:
            model = CompiledModel(description, checkpoint, compiled.thread_pool(), COMPILED[kind])
    del checkpoint
    kept = live.now()
    largest = _largest_layer(description, torch.float32)
    assert live.peak <= kept + 2 * largest
    # A layer's tensors that were kept would be seen.
    assert 4 * largest < NUM_LAYERS * largest
    del model


class ScaledFormat(DenseFormat):
    """Dense weights, each beside a scale."""

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        return {**super().tensors(layer, outputs, inputs), f"{layer}.scale": (outputs, 1)}


@torch.inference_mode()
def test_a_tied_head_of_any_format_is_not_read(save_model: Save) -> None:
    directory = save_model(LlamaConfig(**SIZES, tie_word_embeddings=True))
    description = _describe(directory)
    assert description.tied_embeddings
    tensors = load_file(directory / "model.safetensors")
    for linear in description.linear_layers:
        for stored in linear.stored:
            tensors[f"{stored.name}.scale"] = torch.ones(sum(stored.outputs), 1)
    tensors["lm_head.weight"] = tensors[description.embedding] + 1
    save_file(tensors, directory / "model.safetensors")
    checkpoint = Checkpoint(directory, ScaledFormat(), torch.float32, CPU)
    built = build(description, checkpoint, KeepWeights())
    checkpoint.check_all_taken()
    assert torch.equal(built.head, built.embedding)


@pytest.mark.parametrize("changed", [None, 0, SIZES["vocab_size"] - 1])
@torch.inference_mode()
def test_a_stored_copy_of_the_embedding_takes_no_memory_and_another_head_is_used(
    changed: int | None, save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.model.weights._ROWS", 10)
    directory = save_model(LlamaConfig(**SIZES, tie_word_embeddings=True))
    description = _describe(directory)
    tensors = load_file(directory / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors[description.embedding].clone()
    if changed is not None:
        head[changed, -1] += 1
    save_file(tensors, directory / "model.safetensors")
    checkpoint = _open(directory, torch.float32)
    built = build(description, checkpoint, KeepWeights())
    checkpoint.check_all_taken()
    assert torch.equal(built.head, head)
    assert (built.head.data_ptr() == built.embedding.data_ptr()) == (changed is None)


@torch.inference_mode()
def test_two_ranks_make_up_the_model(save_model: Save) -> None:
    directory = save_model(
        LlamaConfig(**SIZES | {"vocab_size": 96}, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    )
    description = _describe(directory)

    def built(shard: Shard) -> Any:
        checkpoint = Checkpoint(directory, format_of(directory), torch.float32, CPU)
        return build(description, checkpoint, KeepWeights(), shard)

    whole, *ranks = [built(Shard()), built(Shard(0, 2)), built(Shard(1, 2))]
    assert torch.equal(torch.cat([rank.head for rank in ranks]), whole.head)
    for number, spec in enumerate(description.layers):
        for name, linear in (
            ("qkv", spec.attention.qkv),
            ("output", spec.attention.output),
            ("mlp.gate_up", spec.mlps[0].gate_up),
            ("mlp.down", spec.mlps[0].down),
        ):
            (weight, bias), *shares = (attrgetter(name)(model.layers[number]) for model in (whole, *ranks))
            if linear.split is SplitDimension.INPUTS:
                assert torch.equal(torch.cat([share for share, _ in shares], 1), weight)
                assert torch.equal(shares[0][1], bias)
                continue
            assert linear.role in (LinearRole.QKV, LinearRole.GATE_UP)
            halves = [width // 2 for width in linear.outputs]
            for tensor, of_ranks in ((weight, [s for s, _ in shares]), (bias, [b for _, b in shares])):
                parts = zip(*(share.split(halves) for share in of_ranks), strict=True)
                assert torch.equal(torch.cat([torch.cat(part) for part in parts]), tensor)
