"""A linear layer is read part by part: fused or separate in the checkpoint, whole or for one rank."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import InvalidDescription, LinearLayer, LinearRole, SplitDimension, StoredLinear
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.linear_weights import WHOLE, LinearWeights, Shard
from worker_svc.model.stored_linear import halves_of_neighbours
from worker_svc.model.weights import Checkpoint

INPUTS, DIM = 12, 4
# Four query heads, two KV heads
WIDTHS = (4 * DIM, 2 * DIM, 2 * DIM)
APART = LinearLayer(
    LinearRole.QKV,
    INPUTS,
    tuple(StoredLinear(name, (width,), bias=name != "k") for name, width in zip("qkv", WIDTHS, strict=True)),
    SplitDimension.OUTPUTS,
    DIM,
)
FUSED = LinearLayer(LinearRole.QKV, INPUTS, (StoredLinear("qkv", WIDTHS, bias=True),), SplitDimension.OUTPUTS, DIM)
TURNS = LinearLayer(
    LinearRole.QKV,
    INPUTS,
    (StoredLinear("turns", (4 * DIM,) * 3, bias=True, interleaved=DIM),),
    SplitDimension.OUTPUTS,
    DIM,
)
EVERY_OTHER = LinearLayer(
    LinearRole.GATE_UP, INPUTS, (StoredLinear("gate_up", (6, 6), bias=True, interleaved=1),), SplitDimension.OUTPUTS
)
DOWN = LinearLayer(LinearRole.DOWN, INPUTS, (StoredLinear("down", (6,), bias=True),), SplitDimension.INPUTS)

Open = Callable[..., Checkpoint]


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for linear in (APART, FUSED, TURNS, EVERY_OTHER, DOWN):
        for stored in linear.stored:
            outputs = sum(stored.outputs)
            made[f"{stored.name}.weight"] = torch.randn(outputs, INPUTS, generator=generator)
            if stored.bias:
                made[f"{stored.name}.bias"] = torch.randn(outputs, generator=generator)
    return made


@pytest.fixture
def read(tensors: dict[str, Tensor], tmp_path: Path) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The weight and bias of a linear layer."""
    save_file(tensors, tmp_path / "model.safetensors")

    def read(
        layer: LinearLayer, shard: Shard = WHOLE, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]:
        checkpoint = Checkpoint(tmp_path, DenseFormat(), dtype, torch.device("cpu"))
        return LinearWeights(layer, checkpoint, shard).fused()

    return read


Read = Callable[..., tuple[Tensor, Tensor | None]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_lie_side_by_side_in_the_models_dtype(dtype: torch.dtype, tensors: dict[str, Tensor], read: Read) -> None:
    weight, bias = read(APART, dtype=dtype)
    assert torch.equal(weight, torch.cat([tensors[f"{name}.weight"] for name in "qkv"]).to(dtype))
    # A part without a bias among others has zeros.
    expected = torch.cat([tensors["q.bias"], torch.zeros(WIDTHS[1]), tensors["v.bias"]]).to(dtype)
    assert bias is not None
    assert torch.equal(bias, expected)
    weight, bias = read(FUSED, dtype=dtype)
    assert bias is not None
    assert torch.equal(weight, tensors["qkv.weight"].to(dtype))
    assert torch.equal(bias, tensors["qkv.bias"].to(dtype))


def test_parts_that_take_turns_head_by_head_are_put_side_by_side(tensors: dict[str, Tensor], read: Read) -> None:
    weight, bias = read(TURNS)
    # As GPT-NeoX: of each head its query, its key and its value
    assert torch.equal(weight, tensors["turns.weight"].view(4, 3, DIM, INPUTS).transpose(0, 1).reshape(-1, INPUTS))
    assert bias is not None
    assert torch.equal(bias, tensors["turns.bias"].view(4, 3, DIM).transpose(0, 1).flatten())


@pytest.mark.parametrize("layer", [APART, FUSED, TURNS], ids=["apart", "fused", "turns"])
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)], ids=str)
def test_neighbours_that_a_model_rotates_are_put_into_halves(layer: LinearLayer, shard: Shard, read: Read) -> None:
    """Of queries and keys, weights and biases; of each head (0, 1, 2, 3) becomes (0, 2, 1, 3)."""
    for given, ordered in zip(read(layer, shard), read(replace(layer, rotated_neighbours=DIM), shard), strict=True):
        assert given is not None
        assert ordered is not None
        *rotated, values = (width // shard.num_ranks for width in layer.outputs)
        heads = (
            given[: sum(rotated)].view(-1, DIM // 2, 2, *given.shape[1:]).transpose(1, 2).reshape(-1, *given.shape[1:])
        )
        assert torch.equal(ordered, torch.cat((heads, given[-values:])))


def test_dimensions_that_are_not_rotated_stay() -> None:
    assert halves_of_neighbours(12, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_parts_that_take_turns_output_by_output_are_put_side_by_side(tensors: dict[str, Tensor], read: Read) -> None:
    weight, bias = read(EVERY_OTHER)
    assert bias is not None
    for tensor, stored in ((weight, tensors["gate_up.weight"]), (bias, tensors["gate_up.bias"])):
        assert torch.equal(tensor, torch.cat((stored[::2], stored[1::2])))


def _transposed(layer: LinearLayer) -> LinearLayer:
    return replace(layer, stored=tuple(replace(stored, transposed=True) for stored in layer.stored))


@pytest.mark.parametrize("layer", [FUSED, TURNS, EVERY_OTHER, DOWN], ids=["fused", "turns", "every other", "single"])
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)], ids=str)
def test_a_transposed_weight_is_read_as_another(
    layer: LinearLayer, shard: Shard, tensors: dict[str, Tensor], read: Read, tmp_path: Path
) -> None:
    expected = read(layer, shard)
    (stored,) = layer.stored
    turned = {f"{stored.name}.weight": tensors[f"{stored.name}.weight"].t().contiguous()}
    save_file(tensors | turned, tmp_path / "model.safetensors")
    weight, bias = read(_transposed(layer), shard)
    assert torch.equal(weight, expected[0])
    assert weight.is_contiguous()
    assert (bias is None) == (expected[1] is None)
    assert bias is None or expected[1] is None or torch.equal(bias, expected[1])


class CodeFormat(DenseFormat):
    """Weights beside a scale."""

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        return {f"{layer}.codes": (outputs, inputs), f"{layer}.scale": (outputs, 1)}


def test_a_transposed_weight_of_another_format_is_refused_by_name(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    weight = tensors.pop("qkv.weight")
    save_file(tensors | {"qkv.codes": weight, "qkv.scale": weight[:, :1].contiguous()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, CodeFormat(), torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match=r"qkv.weight: .* only dense weights .* has qkv.codes, qkv.scale"):
        LinearWeights(_transposed(FUSED), checkpoint).fused()


def test_turns_that_do_not_fit_the_parts_are_refused() -> None:
    for outputs, turn in (((16, 16, 8), 4), ((12, 12), 8)):
        with pytest.raises(InvalidDescription, match=f"^qkv: must be of parts .*, a multiple of {turn}"):
            StoredLinear("qkv", outputs, interleaved=turn)


@pytest.mark.parametrize("layer", [APART, FUSED, TURNS, EVERY_OTHER], ids=["apart", "fused", "turns", "every other"])
def test_ranks_divide_the_heads_of_every_part(layer: LinearLayer, read: Read) -> None:
    whole, whole_bias = read(layer)
    assert whole_bias is not None
    shares, biases = zip(*(read(layer, Shard(rank, 2)) for rank in range(2)), strict=True)
    for whole_tensor, of_ranks in ((whole, shares), (whole_bias, biases)):
        by_part = [share.split([width // 2 for width in layer.outputs]) for share in of_ranks]
        together = [torch.cat(parts) for parts in zip(*by_part, strict=True)]
        assert torch.equal(torch.cat(together), whole_tensor)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_summands_of_ranks_that_divide_inputs_add_up(num_ranks: int, read: Read) -> None:
    weight, bias = read(DOWN)
    inputs = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(1))
    summands = []
    for rank, share in enumerate(inputs.chunk(num_ranks, 1)):
        part, part_bias = read(DOWN, Shard(rank, num_ranks))
        assert (part_bias is None) == (rank > 0)
        summands.append(torch.nn.functional.linear(share, part, part_bias))
    torch.testing.assert_close(sum(summands), torch.nn.functional.linear(inputs, weight, bias))


def test_heads_that_ranks_cannot_share_are_refused_by_name(read: Read) -> None:
    with pytest.raises(UnsupportedModel, match=r"k: 8 in units of 4 .* among 4 ranks"):
        read(APART, Shard(0, 4))
    with pytest.raises(UnsupportedModel, match=r"qkv: 8 in units of 4 .* among 4 ranks"):
        read(FUSED, Shard(0, 4))
    with pytest.raises(UnsupportedModel, match=r"down: 12 in units of 1 .* among 5 ranks"):
        read(DOWN, Shard(0, 5))


def test_a_tensor_of_another_shape_is_refused_by_name(read: Read) -> None:
    wide = LinearLayer(LinearRole.DOWN, INPUTS + 1, DOWN.stored, SplitDimension.INPUTS)
    with pytest.raises(UnsupportedModel, match=r"down.weight .* is \[6, 12\], not \[6, 13\]"):
        read(wide)
