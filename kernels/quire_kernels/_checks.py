"""Checks of tensor arguments shared by the ops. Only metadata is looked at, so a check never waits for a GPU."""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def require(condition: bool, argument: str, rule: str) -> None:
    """Raise ValueError "argument: must ..." unless the condition holds."""
    if not condition:
        raise ValueError(f"{argument}: must {rule}")


def check_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    """Both caches must be one layer's view [num_blocks, num_kv_heads, block_size, head_dim] of the worker's cache."""
    require(key_cache.ndim == 4, "key_cache", "be [num_blocks, num_kv_heads, block_size, head_dim]")
    require(key_cache.dtype in FLOAT_DTYPES, "key_cache", "be float32, float16 or bfloat16")
    require(key_cache.stride(3) == 1, "key_cache", "be contiguous in its last dimension")
    require(value_cache.shape == key_cache.shape, "value_cache", "have the shape of key_cache")
    require(value_cache.stride() == key_cache.stride(), "value_cache", "have the strides of key_cache")
    check_like(value_cache, key_cache, "value_cache")


def check_heads(tensor: Tensor, key_cache: Tensor, argument: str) -> None:
    """A per-token tensor must be [num_tokens, heads, head_dim] in the dtype and on the device of the cache."""
    require(tensor.ndim == 3, argument, "be [num_tokens, heads, head_dim]")
    require(tensor.shape[2] == key_cache.shape[3], argument, "have the head_dim of key_cache")
    require(tensor.stride(2) == 1, argument, "be contiguous in its last dimension")
    check_like(tensor, key_cache, argument)


def check_like(tensor: Tensor, key_cache: Tensor, argument: str) -> None:
    """The tensor must have the dtype and the device of the cache."""
    require(tensor.dtype == key_cache.dtype, argument, "have the dtype of key_cache")
    require(tensor.device == key_cache.device, argument, "be on the device of key_cache")


def check_index(tensor: Tensor, key_cache: Tensor, shape: tuple[int, ...], dtype: torch.dtype, argument: str) -> None:
    """An index tensor must have the shape and dtype, be contiguous, and be on the device of the cache."""
    require(tuple(tensor.shape) == shape, argument, f"have shape {list(shape)}, not {list(tensor.shape)}")
    require(tensor.dtype == dtype, argument, f"be {str(dtype).removeprefix('torch.')}")
    require(tensor.is_contiguous(), argument, "be contiguous")
    require(tensor.device == key_cache.device, argument, "be on the device of key_cache")


def check_store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """The arguments of `store_kv` and of `cpu_store_kv`."""
    check_cache(key_cache, value_cache)
    check_heads(key, key_cache, "key")
    require(key.shape[1] == key_cache.shape[1], "key", "have the num_kv_heads of key_cache")
    require(value.shape == key.shape, "value", "have the shape of key")
    check_heads(value, key_cache, "value")
    check_index(slots, key_cache, (key.shape[0],), torch.int64, "slots")
