"""The product of shapes for which the attention kernels are compared with their references on a GPU.

Most of the time is spent on compilation, so cases run in several processes, each with its own CUDA context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from paged_batches import assert_close, make_batch
from pairwise import pairwise

HEADS = [(1, 1), (1, 8), (3, 3), (8, 4), (32, 1)]
HEAD_DIMS = [64, 80, 96, 128, 256]
BLOCK_SIZES = [8, 16, 32, 128]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Lengths around the borders of pages, tiles and splits
CONTEXTS = sorted(
    {1, *(edge + step for edge in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) for step in (-1, 0, 1))}
)
# Queries of the longest chunk: more than a tile has rows, whatever the group
LONGEST_CHUNK = 140


@dataclass(frozen=True)
class Case:
    """A shape, and the options of attention over it."""

    heads: tuple[int, int]
    head_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        extras = [self.cache_dtype, self.window, self.soft_cap]
        names = [f"{self.heads[0]}x{self.heads[1]}", self.head_dim, self.block_size, self.dtype, *filter(None, extras)]
        return "-".join(str(name).removeprefix("torch.") for name in names)


def all_shapes() -> list[Case]:
    """Plain attention over every shape."""
    return [
        Case(heads, head_dim, block_size, dtype)
        for dtype, block_size, head_dim, heads in product(DTYPES, BLOCK_SIZES, HEAD_DIMS, HEADS)
    ]


def all_extras() -> list[Case]:
    """Quantized caches, windows and caps, in all pairs with each other and with every dimension of a shape."""
    parameters: dict[str, Sequence[Any]] = {
        "cache_dtype": [None, torch.int8, torch.float8_e4m3fn],
        "window": [None, 1, 100, 1000],
        "soft_cap": [None, 1.5],
        "heads": HEADS,
        "head_dim": [*HEAD_DIMS, 512],
        "block_size": BLOCK_SIZES,
        "dtype": DTYPES,
    }
    return [Case(**case) for case in pairwise(parameters)]


def check(case: Case) -> None:
    """Compares both kernels with their references, over all contexts in one batch each."""
    # Here, so that a process that only lists the cases does not choose how kernels run
    from quire_kernels.paged_attention import paged_attention, paged_attention_reference
    from quire_kernels.paged_decode import paged_decode, paged_decode_reference

    torch.backends.cuda.matmul.allow_tf32 = False
    shape = {name: value for name, value in vars(case).items() if name != "heads"} | {"device": "cuda"}
    chunks = [(min(context, 1 + (37 * context) % LONGEST_CHUNK), context) for context in CONTEXTS]
    arguments: dict[str, Any] = make_batch([*chunks, (1, 300), (300, 300)], case.heads, **shape).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))
    batch = make_batch([(1, context) for context in CONTEXTS], case.heads, **shape)
    expected = paged_decode_reference(**batch.decode_arguments())
    for keys_per_split in (None, 512):
        assert_close(paged_decode(**batch.decode_arguments(keys_per_split=keys_per_split)), expected)
    torch.cuda.empty_cache()
