"""Queries and keys are rotated, keys and values stored, as in the reference and in transformers' layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.kv_quantization import dequantize
from quire_kernels.rotary_store import HeadNorm, rotary_store, rotary_store_reference

SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# The tolerance of codes for near-ties that the two sides round differently. The interpreter does not round float8.
CODE_ERRORS = {torch.int8: 1 / 127} | ({torch.float8_e4m3fn: 1 / 16} if torch.cuda.is_available() else {})

Arguments = dict[str, Any]
Check = Callable[[Tensor, Tensor], None]


@pytest.fixture
def make_arguments(device: str) -> Callable[..., Arguments]:
    def make(
        num_tokens: int = 5,
        num_heads: int = 3,
        num_kv_heads: int = 3,
        head_dim: int = 64,
        rotary_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        positions: list[int] | None = None,
        values_are_keys: bool = False,
        **others: Any,
    ) -> Arguments:
        torch.manual_seed(0)
        num_blocks = num_tokens + 4
        cache = torch.zeros(num_blocks, 2, 2, num_kv_heads, block_size, head_dim, device=device)
        cache = cache.to(cache_dtype or dtype)
        slots = torch.randperm(num_blocks * block_size)[:num_tokens]
        slots[1::3] = -1
        rotary_dim = rotary_dim or head_dim
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        sampled = torch.randint(131_072, (num_tokens,)) if positions is None else torch.tensor(positions)
        # A part of a wider row
        num_parts = 1 if values_are_keys else 2
        qkv = torch.randn(num_tokens, (num_heads + num_parts * num_kv_heads + 1) * head_dim)[:, head_dim:]
        scales = {}
        if cache_dtype is not None:
            both = torch.zeros(num_blocks, 2, 2, num_kv_heads, block_size, device=device)
            scales = {"key_scales": both[:, 1, 0], "value_scales": both[:, 1, 1]}
        return {
            "qkv": qkv.to(device, dtype),
            "positions": sampled.to(device),
            "frequencies": (1.0 / 500_000.0**exponents).to(device),
            "key_cache": cache[:, 1, 0],
            "value_cache": cache[:, 1, 1],
            "slots": slots.to(device),
            "values_are_keys": values_are_keys,
            **scales,
            **others,
        }

    return make


def caches(arguments: Arguments) -> Tensor:
    """Keys and values as they are read, including slots that were not stored."""
    names = ("key", "value")
    return torch.stack([dequantize(arguments[f"{name}_cache"], arguments.get(f"{name}_scales")) for name in names])


def check(make: Callable[[], Arguments], assert_close: Check, tolerance: float | None = None) -> None:
    actual, expected = make(), make()
    assert_close(rotary_store(**actual), rotary_store_reference(**expected))
    seen, wanted = caches(actual), caches(expected)
    stored = (wanted != 0).any(-1)
    assert torch.equal((seen != 0).any(-1), stored)
    if tolerance is None:
        tolerance = 1e-3 if actual["qkv"].dtype == torch.float32 else 1e-2
    assert bool(((seen - wanted)[stored].norm(dim=-1) < tolerance * wanted[stored].norm(dim=-1)).all())


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (1, 1, 64, 16, torch.float32),
        (9, 3, 64, 32, SIXTEEN_BITS),
        (8, 1, 80, 8, SIXTEEN_BITS),
        (3, 3, 96, 128, torch.float32),
        (32, 8, 128, 16, torch.float32),
        (5, 5, 256, 8, SIXTEEN_BITS),
    ],
)
def test_full_rotation(
    make_arguments: Callable[..., Arguments],
    assert_close: Check,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(lambda: make_arguments(**shape, dtype=dtype), assert_close)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 16), (80, 32), (128, 96), (96, 2), (256, 64)])
def test_partial_rotation(
    make_arguments: Callable[..., Arguments], assert_close: Check, head_dim: int, rotary_dim: int
) -> None:
    check(lambda: make_arguments(head_dim=head_dim, rotary_dim=rotary_dim), assert_close)


@pytest.mark.parametrize("rotary_dim", [128, 32])
@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize("after_rotation", [False, True])
def test_norms_of_heads(
    make_arguments: Callable[..., Arguments],
    assert_close: Check,
    device: str,
    rotary_dim: int,
    dtype: torch.dtype,
    after_rotation: bool,
) -> None:
    weights = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    # Large, so that they matter
    norm = HeadNorm(weights[0], weights[1], 0.5, 2.0, after_rotation)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "rotary_dim": rotary_dim, "dtype": dtype}
    check(lambda: make_arguments(**shape, norm=norm), assert_close)


@pytest.mark.parametrize("cache_dtype", [None, *CODE_ERRORS], ids=str)
@pytest.mark.parametrize("values_are_keys", [False, True])
@pytest.mark.parametrize(("normed", "after_rotation"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 32), (512, 512)])
def test_norms_of_values(
    make_arguments: Callable[..., Arguments],
    assert_close: Check,
    device: str,
    cache_dtype: torch.dtype | None,
    values_are_keys: bool,
    normed: bool,
    after_rotation: bool,
    head_dim: int,
    rotary_dim: int,
) -> None:
    weights = torch.randn(2, head_dim, generator=torch.Generator().manual_seed(1)).to(device)
    norm = HeadNorm(weights[0], weights[1], 0.5, 2.0, after_rotation) if normed else None
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "rotary_dim": rotary_dim}
    how = {"cache_dtype": cache_dtype, "norm": norm, "value_epsilon": 0.25, "values_are_keys": values_are_keys}
    tolerance = CODE_ERRORS.get(cache_dtype) if cache_dtype else None
    check(lambda: make_arguments(**shape, **how), assert_close, tolerance)
    arguments = make_arguments(**shape, **how)
    rotary_store(**arguments)
    # Values of a token that is stored have the root mean square of 1, but for the epsilon.
    stored = caches(arguments)[1]
    mean_squares = stored[(stored != 0).any(-1)].float().square().mean(-1)
    assert ((mean_squares > 0.5) & (mean_squares < 1.0)).all()


def test_values_that_are_keys_are_those_before_norm_and_rotation(
    make_arguments: Callable[..., Arguments], device: str
) -> None:
    weights = torch.full((2, 64), 3.0, device=device)
    norm = HeadNorm(weights[0], weights[1], 1e-6, 1e-6)
    arguments = make_arguments(num_tokens=1, num_heads=2, num_kv_heads=1, values_are_keys=True, norm=norm)
    rotary_store(**arguments)
    stored = caches(arguments)[1]
    assert torch.equal(stored[(stored != 0).any(-1)][0], arguments["qkv"][0, 128:])


@pytest.mark.parametrize("cache_dtype", [None, *CODE_ERRORS], ids=str)
@pytest.mark.parametrize(("head_dim", "normed"), [(64, False), (80, True), (15, False)])
def test_without_positions_nothing_is_rotated(
    make_arguments: Callable[..., Arguments],
    assert_close: Check,
    device: str,
    cache_dtype: torch.dtype | None,
    head_dim: int,
    normed: bool,
) -> None:
    weights = torch.randn(2, head_dim, generator=torch.Generator().manual_seed(1)).to(device)
    norm = HeadNorm(weights[0], weights[1], 1e-6, 1e-5) if normed else None
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "cache_dtype": cache_dtype}

    def make() -> Arguments:
        return make_arguments(**shape, norm=norm) | {"frequencies": None}

    check(make, assert_close, tolerance=CODE_ERRORS.get(cache_dtype) if cache_dtype else None)
    if not normed:
        arguments = make()
        query = arguments["qkv"].view(len(arguments["qkv"]), -1, head_dim)[:, :4]
        assert torch.equal(rotary_store(**arguments), query)


@pytest.mark.parametrize("cache_dtype", CODE_ERRORS, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32)])
def test_quantized_cache(
    make_arguments: Callable[..., Arguments],
    assert_close: Check,
    cache_dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
) -> None:
    shape = {"head_dim": head_dim, "rotary_dim": rotary_dim, "cache_dtype": cache_dtype}
    check(lambda: make_arguments(**shape), assert_close, tolerance=CODE_ERRORS[cache_dtype])


def test_attention_factor_scales_what_is_turned(make_arguments: Callable[..., Arguments], assert_close: Check) -> None:
    plain = rotary_store(**make_arguments())
    scaled = rotary_store(**make_arguments(attention_factor=1.25))
    assert_close(scaled, plain * 1.25)
    check(lambda: make_arguments(rotary_dim=32, attention_factor=1.25), assert_close)


def test_far_positions_are_as_exact_as_near_ones(make_arguments: Callable[..., Arguments]) -> None:
    positions = [0, 1, 4095, 65_537, 105_616, 131_071]
    arguments = make_arguments(num_tokens=6, num_heads=1, num_kv_heads=1, positions=positions)
    query = arguments["qkv"][:, :64].double()
    angles = (arguments["positions"][:, None].float() * arguments["frequencies"]).double()
    expected = query * angles.cos().repeat(1, 2) + query.roll(32, -1) * torch.cat((-angles.sin(), angles.sin()), -1)
    assert bool(((rotary_store(**arguments)[:, 0] - expected).abs() < 2e-6).all())


def test_turns_as_transformers_does(make_arguments: Callable[..., Arguments], assert_close: Check) -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
    config = LlamaConfig(hidden_size=192, num_attention_heads=3, rope_parameters=scaling)
    embedding = LlamaRotaryEmbedding(config)
    arguments = make_arguments(num_tokens=4, positions=[0, 5, 77, 127])
    device = arguments["qkv"].device
    arguments |= {"frequencies": embedding.inv_freq.to(device), "attention_factor": embedding.attention_scaling}
    query, key = arguments["qkv"].cpu().view(1, 4, 9, 64).transpose(1, 2)[:, :6].split(3, dim=1)
    cosine, sine = embedding(query, arguments["positions"].cpu()[None])
    expected, _ = apply_rotary_pos_emb(query, key, cosine, sine)
    assert embedding.attention_scaling != 1.0
    assert_close(rotary_store(**arguments), expected[0].transpose(0, 1).contiguous().to(device))


def test_negative_slots_store_nothing(make_arguments: Callable[..., Arguments], assert_close: Check) -> None:
    arguments = make_arguments()
    stored = rotary_store(**arguments)
    unstored = make_arguments()
    unstored["slots"].fill_(-1)
    assert torch.equal(rotary_store(**unstored), stored)
    assert not caches(unstored).any()


def test_queries_beside_keys_alone(make_arguments: Callable[..., Arguments]) -> None:
    arguments = make_arguments(values_are_keys=True)
    with pytest.raises(ValueError, match=r"^qkv: must hold query heads beside key_cache's num_kv_heads twice"):
        rotary_store(**arguments | {"values_are_keys": False})
    arguments["qkv"] = arguments["qkv"][:, : 3 * 64]
    with pytest.raises(ValueError, match=r"^qkv: must hold query heads beside key_cache's num_kv_heads once"):
        rotary_store(**arguments)


def test_no_tokens(make_arguments: Callable[..., Arguments]) -> None:
    assert rotary_store(**make_arguments(num_tokens=0)).shape == (0, 3, 64)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("qkv", lambda qkv: qkv[0]),
        ("qkv", lambda qkv: qkv[:, :-1]),
        ("qkv", lambda qkv: qkv[:, : 6 * 64]),
        ("qkv", lambda qkv: qkv.half()),
        ("qkv", lambda qkv: qkv.T.contiguous().T),
        ("positions", lambda positions: positions.int()),
        ("positions", lambda positions: positions[1:]),
        ("frequencies", lambda frequencies: frequencies.double()),
        ("frequencies", lambda frequencies: frequencies.repeat(2)),
        ("frequencies", lambda frequencies: frequencies[:0]),
        ("slots", lambda slots: slots[1:]),
        ("value_cache", lambda cache: cache.contiguous()),
        ("norm.query_weight", lambda norm: norm._replace(query_weight=torch.ones(63))),
        ("norm.key_weight", lambda norm: norm._replace(key_weight=norm.key_weight.long())),
    ],
)
def test_a_wrong_argument_is_named(
    make_arguments: Callable[..., Arguments], argument: str, change: Callable[[Any], Any], device: str
) -> None:
    ones = torch.ones(64, device=device)
    arguments = make_arguments(norm=HeadNorm(ones, ones, 1e-6, 1e-6))
    name = argument.split(".")[0]
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=f"^{argument}: "):
        rotary_store(**arguments)
