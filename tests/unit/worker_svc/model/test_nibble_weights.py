"""Codes of 4 bits that a checkpoint has are multiplied as they are, and others are rounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

import compiled
import llama_models
from joined_heads import joined_heads
from llama_models import SIZES
from quantized_models import in_act_order, in_order, quantize, save_quantized
from quire_kernels.cpu.linear import MatrixFormat, PackedMatrix, linear
from runner_driver import Driver, make_runner
from worker_svc.attention import CompiledKernels
from worker_svc.model.architecture import describe
from worker_svc.model.building import BuiltMlp
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.formats._grouped import GroupedWeight, PackedCodes
from worker_svc.model.formats._scaled import ScaledWeight, blocks
from worker_svc.model.formats.dense import DenseWeight
from worker_svc.model.nibble_weights import _in_groups, _kept
from worker_svc.model.stored_linear import _Ranges
from worker_svc.model.weight_format import GroupCodes, group_codes

Save = Callable[..., Path]

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)


def _meant(codes: GroupCodes) -> Tensor:
    return (codes.codes.float() - codes.zeros.float()[:, codes.groups]) * codes.scales.float()[:, codes.groups]


def _packed(bits: int) -> GroupedWeight:
    codes = PackedCodes.whole(torch.randint(-(2**31), 2**31, (8, 6), dtype=torch.int64).int(), bits, 0)
    inputs = 8 * 32 // bits
    scales = torch.rand(2, 6).half()
    return GroupedWeight(codes, torch.randint(0, 2**bits, (2, 6), dtype=torch.uint8), scales, torch.arange(inputs) % 2)


def _in_bytes(*, zeros: bool = False) -> ScaledWeight:
    codes = torch.randint(-8, 8, (6, 64), dtype=torch.int8)
    scales = torch.rand(3, 2).half()
    points = torch.randint(-8, 8, (3, 2), dtype=torch.int8) if zeros else None
    return ScaledWeight(codes, scales, points, blocks(6, 2), blocks(64, 32))


@pytest.mark.parametrize(
    "make", [lambda: _packed(4), lambda: _packed(2), _in_bytes, lambda: _in_bytes(zeros=True)],
    ids=["4 bits", "2 bits", "in bytes", "in bytes with zero points"],
)  # fmt: skip
def test_codes_of_4_bits_at_most_are_offered(make: Callable[[], GroupedWeight | ScaledWeight]) -> None:
    torch.manual_seed(0)
    weight = make()
    for part in (weight, weight.inputs(16, 32), _Ranges(weight, (range(4, 6), range(1)))):
        found = group_codes(part)
        assert found is not None
        assert found.codes.max() <= 15
        torch.testing.assert_close(_meant(found), part.dense().float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "weight",
    [
        DenseWeight(torch.ones(3, 4)),
        _packed(8),
        ScaledWeight(torch.full((3, 4), 8, dtype=torch.int8), torch.ones(3, 1), None, blocks(3, 1), blocks(4, None)),
        ScaledWeight(torch.ones(3, 4).to(torch.float8_e4m3fn), torch.ones(3, 1), None, blocks(3, 1), blocks(4, None)),
    ],
    ids=["dense", "8 bits", "8 bits in bytes", "FP8"],
)
def test_other_weights_have_none(weight: DenseWeight | GroupedWeight | ScaledWeight) -> None:
    assert group_codes(weight) is None
    assert group_codes(_Ranges(weight, (range(2),))) is None


@pytest.mark.parametrize(
    ("groups", "size", "is_ordered"),
    [
        (in_order(300, 32), 32, True),
        (in_order(300, 64), 64, True),
        (in_order(300, 96), 32, True),
        (in_order(256, 256), 128, True),
        (in_order(100, -1), 128, True),
        (in_order(256, 64)[32:], 32, True),  # a rank's share
        (in_act_order(256, 64), 64, False),
        (in_act_order(300, 128), 128, False),
        (in_order(96, 48), 16, True),
        (in_order(96, 24), None, True),
        (in_act_order(256, 64)[:100], None, False),
    ],
    ids=str,
)
def test_groups_of_stored_codes_become_those_of_a_product(groups: Any, size: int | None, is_ordered: bool) -> None:
    torch.manual_seed(0)
    count = int(groups.max()) + 1
    codes = GroupCodes(
        torch.randint(0, 16, (5, len(groups)), dtype=torch.uint8),
        torch.randint(0, 16, (5, count), dtype=torch.uint8),
        torch.rand(5, count).half(),
        torch.from_numpy(groups),
    )
    kept = _kept(codes)
    assert (kept is None) == (size is None)
    if kept is None:
        return
    assert kept.group == size
    assert (kept.order is None) == is_ordered
    assert torch.equal(kept.dense(), _meant(codes))
    assert torch.equal(_in_groups(kept, min(32, kept.group)).dense(), _meant(codes))


def _config(group_size: int, *, act_order: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": act_order}


def _gptq(group_size: int, *, sym: bool = False, seeds: Callable[[str], int | None] = lambda _: None) -> Any:
    """A function that quantizes layers so; `seeds` are those of the orders of groups."""

    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if layer == "lm_head":
            return None
        seed, inputs = seeds(layer), weight.shape[1]
        groups = in_order(inputs, group_size) if seed is None else in_act_order(inputs, group_size, seed)
        numbers = quantize(weight, 4, groups, sym=sym)
        return numbers.gptq(layer), numbers.dense()

    return quantized


def _load(directory: Path, weights: MatrixFormat, dtype: torch.dtype = torch.float32) -> Any:
    description = describe(read_config(directory))
    assert description is not None
    return load_compiled_model(description, directory, dtype, CompiledKernels(compiled.thread_pool(), weights))


def _restored(matrix: PackedMatrix, inputs: int) -> Tensor:
    """The weight that a matrix holds."""
    return linear(compiled.thread_pool(), torch.eye(inputs), matrix).t()


@pytest.mark.parametrize("order", ["none", "of each input", "of each layer"])
@pytest.mark.parametrize("sym", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_a_model_is_computed_with_its_own_codes(
    group_size: int, sym: bool, order: str, save_model: Save, tmp_path: Path
) -> None:
    """Layers of the same inputs have one order, as the format's tools make it, or their weights are rounded anew."""
    directory = save_model(LlamaConfig(**WIDE))
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inputs = {name: place for place, part in enumerate((names[:3], names[3:4], names[4:6], names[6:])) for name in part}

    def seed(layer: str) -> int | None:
        name = layer.rpartition(".")[2]
        return {"none": None, "of each input": inputs[name], "of each layer": names.index(name)}[order]

    packed = save_quantized(
        directory, tmp_path / "packed", _gptq(group_size, sym=sym, seeds=seed),
        quantization_config=_config(group_size, act_order=order != "none"),
    )  # fmt: skip
    meant = load_file(directory / "model.safetensors")
    layer = _load(packed, MatrixFormat.W4A16).built.layers[1]
    assert isinstance(layer.mlp, BuiltMlp)
    is_ordered = order == "none" or group_size == -1
    for matrix, parts in (
        (layer.qkv, names[:3]),
        (layer.output, names[3:4]),
        (layer.mlp.gate_up, names[4:6]),
        (layer.mlp.down, names[6:]),
    ):
        kind = "self_attn" if matrix in (layer.qkv, layer.output) else "mlp"
        weights = [meant[f"model.layers.1.{kind}.{part}.weight"] for part in parts]
        width = weights[0].shape[1]
        held = _restored(matrix, width)
        if matrix is layer.mlp.gate_up:
            panels = held.view(-1, 2, 16, width)
            held = torch.cat([panels[:, part].flatten(0, 1)[: len(weights[0])] for part in range(2)])
        dense = joined_heads(weights, WIDE["head_dim"]) if matrix is layer.qkv else torch.cat(weights)
        is_kept = len(parts) == 1 or order != "of each layer" or is_ordered
        assert (matrix.order is None) == (is_ordered or not is_kept)
        # Numbers that are rounded anew are off by half a step of theirs.
        torch.testing.assert_close(held, dense, rtol=1e-3, atol=1e-5 if is_kept else 0.2 * float(dense.abs().max()))
        assert is_kept or bool((held - dense).abs().max() > 1e-3)


@pytest.mark.parametrize("weights", [MatrixFormat.W4A16, MatrixFormat.W4A8], ids=lambda each: each.name)
@pytest.mark.parametrize("order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_mostly_those_of_the_unpacked_model(
    dtype: torch.dtype, order: bool, weights: MatrixFormat, save_model: Save, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    seeds: Callable[[str], int | None] = (lambda _: 5) if order else (lambda _: None)
    packed = save_quantized(
        directory, tmp_path / "packed", _gptq(32, seeds=seeds), quantization_config=_config(32, act_order=order)
    )
    asked = llama_models.prompts(1, 5, 9, 16, 17, 30, 33, 40)
    sampled = Driver(make_runner(packed, "compiled", weights=weights, dtype=dtype)).generate(asked, 1)
    expected = Driver(make_runner(packed, "compiled", dtype=dtype)).generate(asked, 1)
    assert sum(a == b for a, b in zip(sampled, expected, strict=True)) >= len(asked) - 2


def test_the_head_has_8_bits(save_model: Save) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    for weights, head in ((MatrixFormat.W4A16, MatrixFormat.INT8), (MatrixFormat.W4A8, MatrixFormat.W8A8)):
        built = _load(directory, weights).built
        assert built.head.matrix.matrix_format is head
        assert built.layers[0].qkv.matrix_format is weights
