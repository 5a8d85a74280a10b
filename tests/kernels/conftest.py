"""Batches over a poisoned cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Arguments of `paged_attention`; all that no query may see is NaN or infinite, or an invalid block."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    max_query_len: int
    scale: float

    def arguments(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are too small for threads, which only wait for each other where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def make_batch(device: str) -> Callable[..., Batch]:
    def make(
        sequences: Sequence[tuple[int, int]],
        heads: tuple[int, int] = (2, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        """Sequences are (queries, context), heads are (KV heads, group)."""
        torch.manual_seed(0)
        num_kv_heads, group = heads
        num_pages = [-(-context // block_size) for _, context in sequences]
        num_blocks = 2 * sum(num_pages) + 3
        cache = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        cache[::3] = float("inf")
        blocks = torch.randperm(num_blocks, dtype=torch.int32)
        block_tables = torch.full((len(sequences), max(num_pages) + 2), 2**31 - 1, dtype=torch.int32)
        block_tables[:, 1::2] = -7
        for row, (_, context) in enumerate(sequences):
            table, blocks = blocks[: num_pages[row]], blocks[num_pages[row] :]
            block_tables[row, : num_pages[row]] = table
            for page, block in enumerate(table.tolist()):
                used = min(block_size, context - page * block_size)
                cache[block, 1, :, :, :used] = torch.randn(2, num_kv_heads, used, head_dim).to(dtype)
        num_queries = torch.tensor([queries for queries, _ in sequences])
        # As a model makes them: the query is a part of a wider row
        qkv = torch.randn(int(num_queries.sum()), num_kv_heads * group + 3, head_dim).to(dtype)
        cache = cache.to(device)
        return Batch(
            query=qkv.to(device)[:, : num_kv_heads * group],
            key_cache=cache[:, 1, 0],
            value_cache=cache[:, 1, 1],
            block_tables=block_tables.to(device),
            query_starts=torch.cat([torch.zeros(1), num_queries.cumsum(0)]).int().to(device),
            context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32, device=device),
            max_query_len=int(num_queries.max()),
            scale=head_dim**-0.5,
        )

    return make


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    def check(actual: Tensor, expected: Tensor) -> None:
        """Relative error, by the norm of each token and head, below 1e-3 in float32 and 1e-2 in 16 bits."""
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        error = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
        assert bool((error < (1e-3 if actual.dtype == torch.float32 else 1e-2)).all())

    return check
