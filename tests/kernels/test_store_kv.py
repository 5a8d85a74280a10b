"""Both ways to store keys and values, against the reference that goes token by token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire_kernels.cpu_attention import cpu_store_kv
from quire_kernels.store_kv import store_kv, store_kv_reference

Store = Callable[..., None]
STORES = [store_kv, cpu_store_kv]
SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture
def make_arguments(device: str) -> Callable[..., dict[str, Any]]:
    def make(
        store: Store,
        num_tokens: int = 5,
        num_kv_heads: int = 3,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Any]:
        torch.manual_seed(0)
        place = "cpu" if store is cpu_store_kv else device
        cache = torch.randn(num_tokens + 4, 2, 2, num_kv_heads, block_size, head_dim).to(place, dtype)
        # As a model makes them: key and value are parts of a wider row
        qkv = torch.randn(num_tokens, 5 * num_kv_heads, head_dim).to(place, dtype)
        slots = torch.randperm((num_tokens + 4) * block_size)[:num_tokens]
        slots[1::3] = -1
        return {
            "key": qkv[:, 3 * num_kv_heads : 4 * num_kv_heads],
            "value": qkv[:, 4 * num_kv_heads :],
            "key_cache": cache[:, 1, 0],
            "value_cache": cache[:, 1, 1],
            "slots": slots.to(place),
        }

    return make


def whole_cache(arguments: dict[str, Any]) -> torch.Tensor:
    cache = arguments["key_cache"]._base
    assert isinstance(cache, torch.Tensor)
    return cache


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 64), (8, 128), (32, 80), (2, 256), (5, 96)])
@pytest.mark.parametrize("block_size", [8, 128])
def test_store(
    make_arguments: Callable[..., dict[str, Any]],
    store: Store,
    dtype: torch.dtype,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    actual, expected = make_arguments(store, **shape), make_arguments(store, **shape)
    store(**actual)
    store_kv_reference(**expected)
    assert torch.equal(whole_cache(actual), whole_cache(expected))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 63])
def test_any_number_of_tokens(make_arguments: Callable[..., dict[str, Any]], store: Store, num_tokens: int) -> None:
    actual, expected = make_arguments(store, num_tokens), make_arguments(store, num_tokens)
    store(**actual)
    store_kv_reference(**expected)
    assert torch.equal(whole_cache(actual), whole_cache(expected))


@pytest.mark.parametrize("store", STORES)
def test_negative_slots_store_nothing(make_arguments: Callable[..., dict[str, Any]], store: Store) -> None:
    arguments = make_arguments(store)
    arguments["slots"].fill_(-1)
    before = whole_cache(arguments).clone()
    store(**arguments)
    assert torch.equal(whole_cache(arguments), before)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("key", lambda key: key[0]),
        ("key", lambda key: key[:, :2]),
        ("key", lambda key: key[..., :32]),
        ("key", lambda key: key.half()),
        ("key", lambda key: key.transpose(1, 2).contiguous().transpose(1, 2)),
        ("value", lambda value: value[:-1]),
        ("value", lambda value: value.half()),
        ("value", lambda value: value.transpose(1, 2).contiguous().transpose(1, 2)),
        ("key_cache", lambda cache: cache[0]),
        ("key_cache", lambda cache: cache.long()),
        ("value_cache", lambda cache: cache[1:]),
        ("value_cache", lambda cache: cache.contiguous()),
        ("slots", lambda slots: slots[1:]),
        ("slots", lambda slots: slots.int()),
    ],
)
def test_a_wrong_argument_is_named(
    make_arguments: Callable[..., dict[str, Any]],
    store: Store,
    argument: str,
    change: Callable[[Any], Any],
) -> None:
    arguments = make_arguments(store)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        store(**arguments)
