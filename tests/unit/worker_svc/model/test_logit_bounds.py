"""The largest logit is the same token, whether all logits are computed or those that bounds leave."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CohereConfig, Gemma2Config, LlamaConfig

import compiled
from llama_models import SIZES
from quire_kernels.cpu.head_bounds import can_bound, pack_head_bounds
from quire_kernels.cpu.linear import MatrixFormat
from worker_svc.attention import CompiledKernels
from worker_svc.batch import Batch
from worker_svc.cache import CacheShape
from worker_svc.model import compiled_builder
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_model import CompiledModel, load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription

Save = Callable[..., Path]
Change = Callable[[dict[str, Tensor]], None]
# Panels of 32, the last one with 9 outputs.
VOCAB = 40 * 32 + 9
LENGTH = 70
_BLOCK_SIZE = 16
_HEAD, _NORM, _EMBEDDING = "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor."""
    monkeypatch.setattr(compiled_builder, "multiplies_bytes", lambda: True)
    monkeypatch.setattr(compiled_builder, "has_amx", lambda _: False)


def random_head(tensors: dict[str, Tensor]) -> None:
    """As it is saved."""


def near_ties(tensors: dict[str, Tensor]) -> None:
    """For each token, logits in four panels that differ by less than codes of 8 bits can say, and one token's twice."""
    head, places = tensors[_HEAD], torch.arange(LENGTH) * 18
    for panel in (3, 17, 18, 39):
        for each in range(0, 32, 4):
            row = head[panel * 32 + each]
            row.copy_(3 * head[each] + 3e-3 * torch.randn_like(row))
    head[17 * 32 + 8] = head[3 * 32 + 8]
    tensors[_EMBEDDING][places] = head[torch.arange(LENGTH) % 8 * 4].clone()


def nearly_flat(tensors: dict[str, Tensor]) -> None:
    """All logits so close that most panels are left."""
    head = tensors[_HEAD]
    head.copy_(head[:1] + 1e-3 * torch.randn_like(head))


def equal_logits(tensors: dict[str, Tensor]) -> None:
    tensors[_HEAD].copy_(tensors[_HEAD][:1].expand_as(tensors[_HEAD]))


def outliers(tensors: dict[str, Tensor]) -> None:
    """Dimensions that are much larger than the rest, as trained models have them."""
    tensors[_NORM][[1, 7]] = 200.0
    tensors[_HEAD][::3, 5] *= 50.0


def ties_behind_other_bounds(tensors: dict[str, Tensor]) -> None:
    """Equal logits in panels 3 and 17. The largest bound is that of another logit in panel 17, which is lower."""
    _states_are_embeddings(tensors)
    head = tensors[_HEAD].mul_(0.1)
    row, other = _orthogonal(head.shape[1])
    head[3 * 32], head[17 * 32] = row, row
    head[17 * 32 + 5] = 0.99 * row + 3 * other
    tensors[_EMBEDDING][torch.arange(LENGTH) * 18] = row + 0.05 * torch.randn(LENGTH, len(row))


def largest_in_the_last_panel(tensors: dict[str, Tensor]) -> None:
    """All logits are negative, unlike zeros of padding."""
    _states_are_embeddings(tensors)
    row, _ = _orthogonal(tensors[_HEAD].shape[1])
    tensors[_HEAD].copy_(-5 * row.expand_as(tensors[_HEAD]))
    tensors[_HEAD][-1] = -0.5 * row
    tensors[_EMBEDDING][torch.arange(LENGTH) * 18] = row + 0.05 * torch.randn(LENGTH, len(row))


def _states_are_embeddings(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()


def _orthogonal(size: int) -> tuple[Tensor, Tensor]:
    row, other = torch.randn(size), torch.randn(size)
    return row, other - (other @ row) / (row @ row) * row


def zeros(tensors: dict[str, Tensor]) -> None:
    tensors[_HEAD].zero_()


CHANGES = [
    random_head,
    near_ties,
    nearly_flat,
    equal_logits,
    outliers,
    ties_behind_other_bounds,
    largest_in_the_last_panel,
    zeros,
]


class _Driver:
    """The logits that follow prompts of one token, and the largest of each."""

    def __init__(self, model: CompiledModel, dtype: torch.dtype) -> None:
        cache = CacheShape.of(model.layout, _BLOCK_SIZE, dtype).allocate(LENGTH, torch.device("cpu"))
        self._forward = model.over(cache)

    def __call__(self, needs_logits: NDArray[np.bool_] | None, count: int = LENGTH) -> tuple[Tensor, list[int]]:
        rows = np.arange(count)
        batch = Batch(
            token_ids=rows * 18,
            positions=np.zeros(count, np.int64),
            slots=rows * _BLOCK_SIZE,
            block_tables=rows[:, None].astype(np.int32),
            query_starts=np.arange(count + 1, dtype=np.int32),
            context_lens=np.ones(count, np.int32),
            max_query_len=1,
            logits_indices=rows,
            needs_logits=needs_logits,
        )
        with torch.inference_mode():
            logits = self._forward(batch)
            return logits.clone(), self._forward.argmax(logits).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden_size", [48, 192])
@pytest.mark.parametrize("change", CHANGES)
def test_the_largest_logit_is_the_same_token(
    change: Change, hidden_size: int, dtype: torch.dtype, save_model: Save
) -> None:
    model = _load(_saved(save_model, hidden_size, change), dtype)
    assert model.built.head.bounds is not None
    driver = _Driver(model, dtype)
    logits, expected = driver(None)
    assert torch.equal(torch.tensor(expected), logits.argmax(-1))
    for count in (1, 7, LENGTH):
        for needed in (np.zeros(count, bool), np.arange(count) % 3 == 1, np.arange(count) == 5):
            written, found = driver(needed, count)
            assert found == expected[:count]
            assert torch.equal(written[needed], logits[:count][needed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token(value: float, dtype: torch.dtype, save_model: Save) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[_EMBEDDING][5 * 18, 7] = value

    driver = _Driver(_load(_saved(save_model, 192, change), dtype), dtype)
    _, expected = driver(None)
    assert [row for row, token in enumerate(expected) if token < 0] == [5]
    assert driver(np.zeros(LENGTH, bool))[1] == expected


@pytest.mark.parametrize("scale", [0.1, 7.0])
def test_logits_are_scaled(scale: float, save_model: Save) -> None:
    config = CohereConfig(
        **{name: size for name, size in SIZES.items() if name != "head_dim"} | {"hidden_size": 96, "vocab_size": VOCAB},
        logit_scale=scale,
    )
    model = _load(save_model(config), torch.float32)
    assert model.built.head.bounds is not None
    driver = _Driver(model, torch.float32)
    assert driver(np.zeros(LENGTH, bool))[1] == driver(None)[1]


def test_panels_whose_bounds_are_below_a_logit_are_left_out(save_model: Save) -> None:
    """Bounds that are far too low leave the panel alone that has the largest."""
    model = _load(_saved(save_model, 192, random_head), torch.float32)
    bounds = model.built.head.bounds
    assert bounds is not None
    panel = torch.arange(len(bounds.norms)) // 32
    with torch.inference_mode():
        bounds.norms.copy_(torch.where(panel == 3, -1e3, -1e6))
    _, found = _Driver(model, torch.float32)(np.zeros(LENGTH, bool))
    assert {token // 32 for token in found} == {3}


@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", [16, 48, 64, 192])
def test_norms_are_those_of_the_weights_and_of_what_rounding_changed(inputs: int, weight: str) -> None:
    head = torch.randn(70, inputs).to(getattr(torch, weight))
    bounds = pack_head_bounds(compiled.thread_pool(), head)
    assert bounds is not None
    rotation = bounds.rotation
    assert torch.equal(rotation @ rotation, torch.eye(len(rotation)))
    assert torch.allclose(bounds.norms[:70], head.float().norm(dim=1), rtol=1e-5)
    turned = (head.double().view(-1, len(rotation)) @ rotation.double()).view(70, inputs)
    assert bounds.codes.scales is not None
    steps = bounds.codes.scales[:70, None].double()
    changed = (turned - (turned / steps).round() * steps).norm(dim=1)
    assert torch.allclose(bounds.errors[:70].double(), changed, rtol=1e-3)
    assert (bounds.norms[70:] == -torch.inf).all()
    assert not bounds.errors[70:].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_that_is_not_finite_has_no_bounds(value: float) -> None:
    head = torch.randn(70, 64)
    head[69, 3] = value
    assert pack_head_bounds(compiled.thread_pool(), head) is None


def test_a_head_of_other_sizes_has_no_bounds() -> None:
    assert can_bound(16)
    assert can_bound(2**15)
    assert not can_bound(54)
    assert not can_bound(2**15 + 64)
    with pytest.raises(ValueError, match="weight: must have a multiple of 16 inputs, at most 32768"):
        pack_head_bounds(compiled.thread_pool(), torch.randn(70, 54))


@pytest.mark.parametrize("weights", [MatrixFormat.INT8, MatrixFormat.W8A8, MatrixFormat.W4A16])
def test_a_head_in_codes_has_no_bounds(weights: MatrixFormat, tiny_llama: Path) -> None:
    assert _load(tiny_llama, torch.float32, weights).built.head.bounds is None


def test_a_soft_cap_leaves_no_bounds(save_model: Save) -> None:
    directory = save_model(Gemma2Config(**SIZES, final_logit_softcapping=30.0))
    assert _load(directory, torch.float32).built.head.bounds is None
    description = _describe(directory)
    assert not compiled_builder.can_bound_head(description)
    assert compiled_builder.can_bound_head(replace(description, logits_soft_cap=None))


def test_a_processor_that_does_not_multiply_bytes_has_no_bounds(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _load(tiny_llama, torch.float32).built.head.bounds is not None
    monkeypatch.setattr(compiled_builder, "multiplies_bytes", lambda: False)
    assert _load(tiny_llama, torch.float32).built.head.bounds is None


def _saved(save_model: Save, hidden_size: int, change: Change) -> Path:
    torch.manual_seed(0)
    directory = save_model(LlamaConfig(**SIZES | {"hidden_size": hidden_size, "vocab_size": VOCAB}))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return directory


def _describe(directory: Path) -> ModelDescription:
    description = describe(read_config(directory))
    assert isinstance(description, ModelDescription)
    return description


def _load(directory: Path, dtype: torch.dtype, weights: MatrixFormat = MatrixFormat.PLAIN) -> CompiledModel:
    return load_compiled_model(_describe(directory), directory, dtype, CompiledKernels(compiled.thread_pool(), weights))
