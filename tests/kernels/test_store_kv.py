"""Both ways to store keys and values, against a reference that stores token by token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire_kernels.cpu_attention import cpu_store_kv
from quire_kernels.kv_quantization import dequantize
from quire_kernels.store_kv import store_kv, store_kv_reference

Store = Callable[..., None]
STORES = [store_kv, cpu_store_kv]
ON_GPU = torch.cuda.is_available()
SIXTEEN_BITS = torch.bfloat16 if ON_GPU else torch.float16
# The interpreter rounds to float8 wrongly.
CACHE_DTYPES = [torch.int8, torch.float8_e4m3fn] if ON_GPU else [torch.int8]


@pytest.fixture
def make_arguments(device: str) -> Callable[..., dict[str, Any]]:
    def make(
        store: Store,
        num_tokens: int = 5,
        num_kv_heads: int = 3,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        torch.manual_seed(0)
        place = "cpu" if store is cpu_store_kv else device
        cache = torch.randn(num_tokens + 4, 2, 2, num_kv_heads, block_size, head_dim).to(place, dtype)
        # As in a model: key and value are slices of a wider row
        qkv = torch.randn(num_tokens, 5 * num_kv_heads, head_dim).to(place, dtype)
        slots = torch.randperm((num_tokens + 4) * block_size)[:num_tokens]
        slots[1::3] = -1
        arguments = {
            "key": qkv[:, 3 * num_kv_heads : 4 * num_kv_heads],
            "value": qkv[:, 4 * num_kv_heads :],
            "key_cache": cache[:, 1, 0],
            "value_cache": cache[:, 1, 1],
            "slots": slots.to(place),
        }
        if cache_dtype is not None:
            cache = torch.zeros_like(cache, dtype=torch.uint8).view(cache_dtype)
            scales = torch.full(cache.shape[:-1], float("nan"), device=place)
            arguments |= {
                "key_cache": cache[:, 1, 0],
                "value_cache": cache[:, 1, 1],
                "key_scales": scales[:, 1, 0],
                "value_scales": scales[:, 1, 1],
            }
        return arguments

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


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (5, 96), (32, 64), (2, 256)])
def test_quantized_store(
    make_arguments: Callable[..., dict[str, Any]],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    """Codes equal the reference, except for some near-ties, where a GPU's fused multiply-add decides."""
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype, "cache_dtype": cache_dtype}
    actual, expected = make_arguments(store_kv, **shape), make_arguments(store_kv, **shape)
    store_kv(**actual)
    store_kv_reference(**expected)
    for name in ("key", "value"):
        scales, expected_scales = actual[f"{name}_scales"], expected[f"{name}_scales"]
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0.0, equal_nan=True)
        codes, expected_codes = (some[f"{name}_cache"].float() for some in (actual, expected))
        same = codes == expected_codes
        assert same.float().mean() > 0.999 if ON_GPU else same.all()
        largest_step = 1.0 if cache_dtype == torch.int8 else 32.0
        assert bool(((codes - expected_codes).abs() <= largest_step).all())


@pytest.mark.parametrize(
    ("cache_dtype", "relative", "absolute"), [(torch.int8, 0.0, 0.501 / 127), (torch.float8_e4m3fn, 0.0626, 1e-5)]
)
def test_quantized_vectors_are_near_what_was_stored(
    make_arguments: Callable[..., dict[str, Any]], cache_dtype: torch.dtype, relative: float, absolute: float
) -> None:
    """The error is at most half a step: 1/127 of the largest element, or the last of 3 mantissa bits."""
    arguments = make_arguments(store_kv, cache_dtype=cache_dtype)
    store = store_kv if cache_dtype in CACHE_DTYPES else store_kv_reference
    store(**arguments)
    for token, slot in enumerate(arguments["slots"].tolist()):
        if slot >= 0:
            place = slot // 16, slice(None), slot % 16
            for name in ("key", "value"):
                vectors = arguments[name][token].float()
                restored = dequantize(arguments[f"{name}_cache"][place], arguments[f"{name}_scales"][place])
                bound = relative * vectors.abs() + absolute * vectors.abs().amax(-1, keepdim=True)
                assert bool(((restored - vectors).abs() <= bound).all())


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_zeros_are_stored_as_zeros(make_arguments: Callable[..., dict[str, Any]], cache_dtype: torch.dtype) -> None:
    arguments = make_arguments(store_kv, num_tokens=1, cache_dtype=cache_dtype)
    arguments["key"].zero_()
    store_kv(**arguments)
    slot = arguments["slots"].item()
    assert bool((arguments["key_cache"].float() == 0.0).all())
    assert bool((arguments["key_scales"][slot // 16, :, slot % 16] == 0.0).all())


def test_a_quantized_cache_is_left_to_the_gpu(make_arguments: Callable[..., dict[str, Any]]) -> None:
    arguments = make_arguments(cpu_store_kv, cache_dtype=torch.int8)
    del arguments["key_scales"], arguments["value_scales"]
    with pytest.raises(ValueError, match=r"^key_cache: "):
        cpu_store_kv(**arguments)


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
