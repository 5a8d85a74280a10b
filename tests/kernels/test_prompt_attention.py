"""Attention within prompts of ragged lengths, against the reference and torch's own attention."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire_kernels.prompt_attention import prompt_attention, prompt_attention_reference

SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16
Check = Callable[[Tensor, Tensor], None]


def make_prompts(
    lengths: Sequence[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Queries, keys and values, which are parts of wider rows; and where the prompts begin."""
    torch.manual_seed(0)
    width = 3 * num_heads * head_dim
    qkv = torch.randn(sum(lengths), width + 5, device=device).to(dtype)[:, :width]
    return qkv, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize(
    ("lengths", "num_heads", "head_dim"),
    [
        ([1], 2, 32),
        ([15, 1, 16, 17], 2, 64),
        ([63, 64, 65], 1, 64),
        ([111, 2, 129], 1, 32),
        ([31, 33, 32, 1, 1], 3, 12),
        ([40], 1, 256),
        ([2, 130], 1, 80),
    ],
    ids=str,
)
def test_each_token_sees_its_prompt(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: str, assert_close: Check
) -> None:
    qkv, starts = make_prompts(lengths, num_heads, head_dim, dtype, device)
    actual = prompt_attention(qkv, starts, num_heads)
    assert actual.is_contiguous()
    heads = (len(qkv), num_heads, head_dim)
    assert_close(actual.view(heads), prompt_attention_reference(qkv, starts, num_heads).view(heads))
    rows = zip(torch.split(qkv.float(), lengths), torch.split(actual, lengths), strict=True)
    for of_prompt, found in rows:
        query, key, value = of_prompt.view(len(found), 3, num_heads, head_dim).permute(1, 2, 0, 3)
        expected = scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1)
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
def test_a_prompts_bits_do_not_depend_on_the_others(dtype: torch.dtype, device: str) -> None:
    lengths = [17, 70, 1, 64]
    qkv, starts = make_prompts(lengths, 2, 32, dtype, device)
    together = torch.split(prompt_attention(qkv, starts, 2), lengths)
    for rows, found in zip(torch.split(qkv, lengths), together, strict=True):
        alone = prompt_attention(rows, torch.tensor([0, len(rows)], dtype=torch.int32, device=device), 2)
        assert torch.equal(alone, found)


def test_a_prompt_that_is_not_finite_leaves_others_alone(device: str) -> None:
    lengths = [5, 40, 3]
    qkv, starts = make_prompts(lengths, 1, 32, torch.float32, device)
    expected = prompt_attention(qkv, starts, 1)
    qkv[5:45] = float("nan")
    found = prompt_attention(qkv, starts, 1)
    assert torch.equal(found[:5], expected[:5])
    assert torch.equal(found[45:], expected[45:])
    assert bool(found[5:45].isnan().all())


def test_large_scores_do_not_overflow(device: str) -> None:
    qkv, starts = make_prompts([33], 1, 32, torch.float32, device)
    qkv = qkv * 100
    assert bool(prompt_attention(qkv, starts, 1).isfinite().all())


def test_no_tokens(device: str) -> None:
    qkv, starts = make_prompts([], 2, 32, torch.float32, device)
    assert prompt_attention(qkv, starts, 2).shape == (0, 64)


@pytest.mark.parametrize(
    ("argument", "qkv", "starts", "num_heads"),
    [
        ("qkv", torch.zeros(4, 96, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 1),
        ("qkv", torch.zeros(96, 4).T, torch.zeros(2, dtype=torch.int32), 1),
        ("qkv", torch.zeros(4, 3 * 264), torch.zeros(2, dtype=torch.int32), 1),
        ("num_heads", torch.zeros(4, 96), torch.zeros(2, dtype=torch.int32), 5),
        ("starts", torch.zeros(4, 96), torch.zeros(2, dtype=torch.int64), 1),
        ("starts", torch.zeros(4, 96), torch.zeros(0, dtype=torch.int32), 1),
    ],
)
def test_a_wrong_argument_is_named(argument: str, qkv: Tensor, starts: Tensor, num_heads: int) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        prompt_attention(qkv, starts, num_heads)
