"""Vectors of layers, of known tokens and of those that the previous step has sampled, against the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.layer_vectors import layer_vectors, layer_vectors_reference
from quire_kernels.row_norm import RowNorm, row_norm_reference

SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def make_arguments(
    device: str, num_layers: int = 3, width: int = 8, dtype: torch.dtype = torch.float32, *, centered: bool = False
) -> dict[str, Any]:
    """Four tokens, of which two were sampled before."""
    torch.manual_seed(0)
    weight, bias = torch.randn(2, width).to(device, dtype)
    return {
        "token_ids": torch.tensor([0, -1, 10, -3], device=device),
        "sampled": torch.tensor([7, 0, 5], device=device),
        "embedding": torch.randn(11, num_layers * width).to(device, dtype),
        # A part of a wider row
        "projected": torch.randn(4, num_layers * width + 5).to(device, dtype)[:, : num_layers * width],
        "norm": RowNorm(weight, 0.5, bias if centered else None, is_centered=centered),
        "embedding_scale": 3.0,
        "scale": 0.7,
    }


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize(("num_layers", "width"), [(1, 1), (5, 24), (3, 111), (35, 256), (2, 1025)])
def test_vectors_are_those_of_the_reference(
    num_layers: int,
    width: int,
    dtype: torch.dtype,
    centered: bool,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    arguments = make_arguments(device, num_layers, width, dtype, centered=centered)
    vectors = layer_vectors(**arguments)
    assert_close(vectors, layer_vectors_reference(**arguments))
    assert vectors.is_contiguous()


def test_each_layer_has_its_own_part_and_norm(device: str) -> None:
    arguments = make_arguments(device)
    embedded, projected = arguments["embedding"][[0, 7, 10, 5]], arguments["projected"]
    vectors = layer_vectors(**arguments)
    for layer in range(3):
        part = slice(8 * layer, 8 * layer + 8)
        expected = (embedded[:, part] * 3.0 + row_norm_reference(projected[:, part], arguments["norm"])) * 0.7
        torch.testing.assert_close(vectors[:, layer], expected)


def test_a_missing_token_is_looked_up_in_bounds(device: str) -> None:
    arguments = make_arguments(device)
    missing = arguments | {"sampled": torch.full((3,), -1, device=device)}
    first = arguments | {"token_ids": torch.tensor([0, 0, 10, 0], device=device)}
    assert torch.equal(layer_vectors(**missing), layer_vectors(**first))
    torch.testing.assert_close(layer_vectors_reference(**missing), layer_vectors(**first))


def test_no_tokens(device: str) -> None:
    arguments = make_arguments(device)
    nothing = {"token_ids": arguments["token_ids"][:0], "projected": arguments["projected"][:0]}
    assert layer_vectors(**arguments | nothing).shape == (0, 3, 8)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("token_ids", lambda ids: ids[1:]),
        ("token_ids", lambda ids: ids.int()),
        ("embedding", lambda table: table[0]),
        ("embedding", lambda table: table[:, 1:]),
        ("projected", lambda rows: rows[:, 1:]),
        ("projected", lambda rows: rows.long()),
        ("projected", lambda rows: rows.T.contiguous().T),
        ("norm.weight", lambda norm: norm._replace(weight=norm.weight[1:])),
        ("norm.weight", lambda norm: norm._replace(weight=norm.weight.long())),
        ("norm.weight", lambda norm: norm._replace(weight=norm.weight[:0])),
        ("norm.bias", lambda norm: norm._replace(bias=norm.weight[1:])),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any], device: str) -> None:
    arguments = make_arguments(device)
    name = argument.split(".")[0]
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        layer_vectors(**arguments)
