"""Weights that are stored in 8 bits with a scale for each output are multiplied as they are stored."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

import compiled
from joined_heads import joined_heads
from llama_models import SIZES
from quantized_models import in_order, quantize, save_quantized
from quire_kernels.cpu.linear import MatrixFormat, PackedMatrix, linear
from worker_svc.attention import CompiledKernels
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.formats._grouped import GroupedWeight, PackedCodes
from worker_svc.model.formats._scaled import ScaledWeight, blocks
from worker_svc.model.formats.dense import DenseWeight
from worker_svc.model.stored_linear import Reordered, _Ranges
from worker_svc.model.weight_format import code_scales, float8_scales

HALVES = torch.tensor([0.5, 0.25, 2.0])


def scaled(codes: torch.dtype = torch.int8, *, zeros: Tensor | None = None, columns: int = 1) -> ScaledWeight:
    return ScaledWeight(
        torch.ones(3, 4, dtype=codes), HALVES[:, None].expand(3, columns), zeros, blocks(3, 1), blocks(4, 4 // columns)
    )


def test_codes_of_one_scale_for_each_output_are_offered() -> None:
    weight = scaled()
    scales = code_scales(weight)
    assert scales is not None
    assert torch.equal(scales, HALVES)
    cut = code_scales(_Ranges(weight.inputs(0, 2), (range(2, 3), range(1))))
    assert cut is not None
    assert torch.equal(cut, HALVES[[2, 0]])


def test_outputs_in_another_order_take_their_scales_along() -> None:
    order = torch.tensor([2, 0, 1])
    for weight, scales_of in ((scaled(), code_scales), (scaled(torch.float8_e4m3fn), float8_scales)):
        reordered = Reordered(weight, order)
        for each, expected in (
            (reordered, order),
            (reordered.inputs(0, 2), order),
            (reordered.outputs(1, 3), order[1:]),
        ):
            scales = scales_of(each)
            assert scales is not None
            assert torch.equal(scales.flatten(), HALVES[expected])
            assert torch.equal(each.dense(), weight.dense()[expected][:, : each.dense().shape[1]])
    assert len(Reordered(scaled(), order).outputs(1, 1).dense()) == 0


@pytest.mark.parametrize(
    "weight",
    [
        DenseWeight(torch.ones(3, 4)),
        scaled(torch.float8_e4m3fn),
        scaled(zeros=torch.ones(3, 1, dtype=torch.int8)),
        scaled(columns=2),
    ],
    ids=["dense", "FP8", "zero points", "groups"],
)
def test_other_weights_have_none(weight: DenseWeight | ScaledWeight) -> None:
    assert code_scales(weight) is None
    assert code_scales(_Ranges(weight, (range(3),))) is None
    assert code_scales(Reordered(weight, torch.arange(3))) is None


@pytest.mark.parametrize(("bits", "zero", "is_coded"), [(8, 128, True), (8, 127, False), (4, 8, False)])
def test_packed_codes_of_8_bits_around_zero_are_offered(bits: int, zero: int, is_coded: bool) -> None:
    codes = PackedCodes.whole(torch.zeros(4, 3, dtype=torch.int32), bits, 0)
    num_inputs = 4 * 32 // bits
    zeros = torch.full((1, 3), zero, dtype=torch.uint8)
    weight = GroupedWeight(codes, zeros, HALVES[None].half(), torch.zeros(num_inputs, dtype=torch.int64))
    scales = code_scales(weight)
    assert (scales is not None) == is_coded
    assert scales is None or torch.equal(scales, HALVES)


def _restored(matrix: PackedMatrix, inputs: int) -> Tensor:
    """The weight that a matrix holds."""
    return linear(compiled.thread_pool(), torch.eye(matrix.inputs, dtype=matrix.dtype)[:inputs], matrix).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "in bytes"])
def test_a_model_is_computed_with_its_own_codes(
    is_packed: bool, dtype: torch.dtype, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where the largest code of an output is not 127."""
    directory = save_model(LlamaConfig(**SIZES))

    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        numbers = quantize(weight, 8, in_order(weight.shape[1], -1), sym=True)
        store = numbers.packed if is_packed else numbers.in_bytes
        return store(layer, sym=True), numbers.dense()

    fields = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if is_packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}},
    }
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    stored, meant = load_file(packed / "model.safetensors"), load_file(directory / "model.safetensors")
    description = describe(read_config(packed))
    assert description is not None
    kernels = CompiledKernels(compiled.thread_pool(), MatrixFormat.INT8)
    built = load_compiled_model(description, packed, dtype, kernels).built
    of_head = stored["lm_head.weight_scale"].flatten().float()
    assert built.head.matrix.scales is not None
    assert torch.equal(built.head.matrix.scales[: len(of_head)], of_head)
    first = built.layers[0]
    name = "model.layers.0.self_attn."
    heads = partial(joined_heads, head_dim=SIZES["head_dim"])
    own = heads([stored[f"{name}{part}_proj.weight_scale"].flatten().float() for part in "qkv"])
    assert first.qkv.scales is not None
    assert torch.equal(first.qkv.scales[: len(own)], own)
    dense = heads([meant[f"{name}{part}_proj.weight"] for part in "qkv"])
    codes = dense / own[:, None]
    assert (codes.round() - codes).abs().max() < 0.1
    assert codes.abs().amax(1).min() < 127.5 < codes.abs().amax(1).max(), "some have -128, as those around zero may"
    torch.testing.assert_close(_restored(first.qkv, dense.shape[1]), codes.round() * own[:, None], rtol=1e-6, atol=0)
    gate_up = first.mlp.gate_up
    assert isinstance(gate_up, PackedMatrix)
    mlp = [meant[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    scales = [stored[f"model.layers.0.mlp.{part}_proj.weight_scale"].flatten().float() for part in ("gate", "up")]
    panels = _restored(gate_up, mlp[0].shape[1]).view(-1, 2, 16, mlp[0].shape[1])
    for part in range(2):
        codes = (mlp[part] / scales[part][:, None]).round()
        held = panels[:, part].flatten(0, 1)[: len(codes)]
        torch.testing.assert_close(held, codes * scales[part][:, None], rtol=1e-6, atol=0)
