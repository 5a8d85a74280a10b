"""Arguments that the ops share, and their checks. Checks read metadata only, so none waits for a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
# The sums of a tile of queries over wider heads do not fit the registers of a GPU's multiprocessor.
MAX_HEAD_DIM, MAX_PROMPT_HEAD_DIM = 512, 256


class PagedKV(NamedTuple):
    """One layer's views of the worker's cache: keys and values [num_blocks, num_kv_heads, block_size, head_dim].

    Scales [num_blocks, num_kv_heads, block_size] come with a cache in 8 bits, and only with one.
    """

    key_cache: Tensor
    value_cache: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Of a block, a head and a slot of the cache; of a block and a head of the scales."""
        block, head, slot, _ = self.key_cache.stride()
        if self.key_scales is None:
            return block, head, slot, 0, 0
        scale_block, scale_head, _ = self.key_scales.stride()
        return block, head, slot, scale_block, scale_head


class AttentionRule(NamedTuple):
    """How scores are made: scaled, then capped by soft_cap * tanh(score / soft_cap), over the last `window` tokens.

    `sinks` float32 [num_heads] are one more score for each head, of a key without a value (arXiv:2309.17453).
    """

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None = None


def require(condition: bool, argument: str, rule: str) -> None:
    """Raises ValueError "argument: must ..." unless the condition holds."""
    if not condition:
        raise ValueError(f"{argument}: must {rule}")


def wider_heads(head_dim: int, most: int) -> str | None:
    """What is refused where heads have more dimensions than `most`; None: they have not."""
    return None if head_dim <= most else f"attention of heads of {head_dim} dimensions: the most is {most}"


def check_cache(kv: PagedKV) -> None:
    """Shapes, dtypes, strides and devices of one layer's views."""
    key_cache, value_cache, key_scales, value_scales = kv
    require(key_cache.ndim == 4, "key_cache", "be [num_blocks, num_kv_heads, block_size, head_dim]")
    if key_scales is None:
        require(key_cache.dtype in FLOAT_DTYPES, "key_cache", "be float32, float16 or bfloat16 where it has no scales")
    else:
        require(key_cache.dtype in QUANTIZED_DTYPES, "key_cache", "be int8 or float8_e4m3fn where it has scales")
    require(key_cache.stride(3) == 1, "key_cache", "be contiguous in its last dimension")
    require(value_cache.shape == key_cache.shape, "value_cache", "have the shape of key_cache")
    require(value_cache.stride() == key_cache.stride(), "value_cache", "have the strides of key_cache")
    require(value_cache.dtype == key_cache.dtype, "value_cache", "have the dtype of key_cache")
    require(value_cache.device == key_cache.device, "value_cache", "be on the device of key_cache")
    require((value_scales is None) == (key_scales is None), "value_scales", "come with key_scales")
    if key_scales is None or value_scales is None:
        return
    for scales, argument in ((key_scales, "key_scales"), (value_scales, "value_scales")):
        require(scales.shape == key_cache.shape[:3], argument, "be [num_blocks, num_kv_heads, block_size]")
        require(scales.dtype == torch.float32, argument, "be float32")
        require(scales.stride(2) == 1, argument, "be contiguous in its last dimension")
        require(scales.device == key_cache.device, argument, "be on the device of key_cache")
    require(value_scales.stride() == key_scales.stride(), "value_scales", "have the strides of key_scales")


def check_heads(tensor: Tensor, key_cache: Tensor, argument: str) -> None:
    """A per-token tensor must be [num_tokens, heads, head_dim] in the dtype and on the device of the cache."""
    require(tensor.ndim == 3, argument, "be [num_tokens, heads, head_dim]")
    require(tensor.shape[2] == key_cache.shape[3], argument, "have the head_dim of key_cache")
    require(tensor.stride(2) == 1, argument, "be contiguous in its last dimension")
    check_like(tensor, key_cache, argument)


def check_like(tensor: Tensor, key_cache: Tensor, argument: str) -> None:
    """The tensor must be on the device of the cache and of its dtype; of any float dtype if the cache is quantized."""
    if key_cache.dtype in QUANTIZED_DTYPES:
        require(tensor.dtype in FLOAT_DTYPES, argument, "be float32, float16 or bfloat16")
    else:
        require(tensor.dtype == key_cache.dtype, argument, "have the dtype of key_cache")
    require(tensor.device == key_cache.device, argument, "be on the device of key_cache")


def check_index(tensor: Tensor, key_cache: Tensor, shape: tuple[int, ...], dtype: torch.dtype, argument: str) -> None:
    """An index tensor must have the shape and dtype, be contiguous, and be on the device of the cache."""
    # Messages are made where a check fails only: every launch comes through here.
    if tensor.shape != shape:
        require(False, argument, f"have shape {list(shape)}, not {list(tensor.shape)}")
    if tensor.dtype != dtype:
        require(False, argument, f"be {str(dtype).removeprefix('torch.')}")
    require(tensor.is_contiguous(), argument, "be contiguous")
    require(tensor.device == key_cache.device, argument, "be on the device of key_cache")


def check_store_kv(key: Tensor, value: Tensor, kv: PagedKV, slots: Tensor) -> None:
    """The arguments of `store_kv` and of `cpu_store_kv`."""
    check_cache(kv)
    key_cache = kv.key_cache
    check_heads(key, key_cache, "key")
    require(key.shape[1] == key_cache.shape[1], "key", "have the num_kv_heads of key_cache")
    require(value.shape == key.shape, "value", "have the shape of key")
    check_heads(value, key_cache, "value")
    require(value.dtype == key.dtype, "value", "have the dtype of key")
    check_index(slots, key_cache, (key.shape[0],), torch.int64, "slots")


def check_attention(
    query: Tensor, kv: PagedKV, block_tables: Tensor, context_lens: Tensor, rule: AttentionRule, out: Tensor | None
) -> None:
    """The arguments that `paged_attention` and `paged_decode` share."""
    check_cache(kv)
    key_cache = kv.key_cache
    check_heads(query, key_cache, "query")
    require(query.shape[2] <= MAX_HEAD_DIM, "query", f"have at most {MAX_HEAD_DIM} dimensions a head")
    require(query.shape[1] % key_cache.shape[1] == 0, "query", "have a multiple of key_cache's num_kv_heads heads")
    require(block_tables.ndim == 2, "block_tables", "be [num_seqs, max_blocks]")
    num_seqs, max_blocks = block_tables.shape
    check_index(block_tables, key_cache, (num_seqs, max_blocks), torch.int32, "block_tables")
    check_index(context_lens, key_cache, (num_seqs,), torch.int32, "context_lens")
    require(rule.scale > 0, "scale", "be positive")
    require(rule.window is None or rule.window >= 1, "window", "be at least 1")
    require(rule.soft_cap is None or rule.soft_cap > 0, "soft_cap", "be positive")
    if rule.sinks is not None:
        check_index(rule.sinks, key_cache, (query.shape[1],), torch.float32, "sinks")
    if out is not None:
        require(out.shape == query.shape, "out", "have the shape of query")
        require(out.dtype == query.dtype, "out", "have the dtype of query")
        require(out.device == query.device, "out", "be on the device of query")
        require(out.stride(2) == 1, "out", "be contiguous in its last dimension")
