"""The compiled attention against the reference. Cache slots that no query may read hold invalid values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled
import quire_kernels.cpu.attention
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.attention import CacheLayer, attend, store
from quire_kernels.paged_attention import paged_attention_reference

BORDERS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 111, 128, 129, 257]


@pytest.fixture(params=["float32", "bfloat16", "amx"])
def arithmetic(request: pytest.FixtureRequest) -> tuple[torch.dtype, bool]:
    """A dtype, and whether AMX computes."""
    if request.param == "amx" and not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    return (torch.float32 if request.param == "float32" else torch.bfloat16), request.param == "amx"


@pytest.fixture
def device() -> str:
    return "cpu"


def compiled_cache(batch: Any) -> CacheLayer:
    """The batch's cache in the layout of the compiled ops, in the second of three layers, NaN elsewhere."""
    num_blocks, num_kv_heads, block_size, head_dim = batch.key_cache.shape
    cache = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=batch.query.dtype)
    layer = CacheLayer(cache, 1)
    for table, context in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        position = torch.arange(context)
        blocks, offsets = table[position // block_size].long(), position % block_size
        key, value = batch.key_cache[blocks, :, offsets], batch.value_cache[blocks, :, offsets]
        store(compiled.thread_pool(), key, value, layer, blocks * block_size + offsets)
    return layer


def attention(batch: Any, **options: Any) -> Tensor:
    return attend(
        compiled.thread_pool(),
        batch.query.contiguous(),
        compiled_cache(batch),
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.scale,
        **options,
    )


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (1, 8), (3, 3), (8, 4), (32, 1), (1, 49)], ids=str)
def test_attention_of_every_shape(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    arithmetic: tuple[torch.dtype, bool],
) -> None:
    dtype, use_amx = arithmetic
    batch = make_batch([(1, 17), (1, 64), (33, 70), (1, 1), (5, 129)], heads, head_dim, block_size, dtype)
    assert_close(attention(batch, use_amx=use_amx), paged_attention_reference(**batch.arguments()))


@pytest.mark.parametrize("block_size", [8, 16, 48])
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, context) for context in BORDERS],
        [(context, context) for context in BORDERS],
        [(min(context, 5), context) for context in BORDERS],
        [(1, 4097), (700, 4096), (1, 4095), (0, 9)],
    ],
    ids=["decodes", "prompts", "chunks", "long"],
)
def test_attention_around_every_border(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    sequences: list[tuple[int, int]],
    block_size: int,
    arithmetic: tuple[torch.dtype, bool],
) -> None:
    dtype, use_amx = arithmetic
    batch = make_batch(sequences, (2, 3), 64, block_size, dtype)
    assert_close(attention(batch, use_amx=use_amx), paged_attention_reference(**batch.arguments()))


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 20}, {"window": 64}, {"soft_cap": 2.0}], ids=str)
def test_windows_and_soft_caps(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    options: dict[str, Any],
    arithmetic: tuple[torch.dtype, bool],
) -> None:
    dtype, use_amx = arithmetic
    batch = make_batch([(1, context) for context in BORDERS] + [(100, 300), (40, 40)], (2, 3), dtype=dtype)
    assert_close(
        attention(batch, use_amx=use_amx, **options), paged_attention_reference(**(batch.arguments() | options))
    )


def test_a_query_gathers_the_same_bits_however_its_sequence_is_cut(
    make_batch: Callable[..., Any], arithmetic: tuple[torch.dtype, bool]
) -> None:
    dtype, use_amx = arithmetic
    batch = make_batch([(130, 333), (1, 700), (64, 64)], (2, 3), dtype=dtype)
    layer, query = compiled_cache(batch), batch.query.contiguous()
    together = attention(batch, use_amx=use_amx)
    for first, last in ((0, 1), (1, 60), (60, 130)):
        alone = attend(
            compiled.thread_pool(),
            query[first:last],
            layer,
            batch.block_tables[:1],
            torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([333 - 130 + last], dtype=torch.int32),
            batch.scale,
            use_amx=use_amx,
        )
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("size", [1, 3])
def test_the_number_of_threads_changes_nothing(
    make_batch: Callable[..., Any], size: int, arithmetic: tuple[torch.dtype, bool]
) -> None:
    dtype, use_amx = arithmetic
    batch = make_batch([(130, 333), (1, 700), (64, 64)], (2, 3), dtype=dtype)
    arguments = (compiled_cache(batch), batch.block_tables, batch.query_starts, batch.context_lens, batch.scale)
    query = batch.query.contiguous()
    assert torch.equal(
        attend(compiled.thread_pool(size), query, *arguments, use_amx=use_amx),
        attend(compiled.thread_pool(), query, *arguments, use_amx=use_amx),
    )


def test_amx_is_refused_where_it_cannot_be_used(
    make_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="use_amx: must be false for another dtype than bfloat16"):
        attention(make_batch([(1, 9)], (1, 1)), use_amx=True)
    monkeypatch.setattr(quire_kernels.cpu.attention, "has_amx", lambda _: False)
    with pytest.raises(ValueError, match="use_amx: must be false on a processor without AMX"):
        attention(make_batch([(1, 9)], (1, 1), dtype=torch.bfloat16), use_amx=True)


def test_tokens_without_a_slot_are_not_stored() -> None:
    cache = torch.zeros(2, 1, 2, 3, 16, 64)
    store(
        compiled.thread_pool(),
        torch.ones(3, 3, 64),
        torch.ones(3, 3, 64),
        CacheLayer(cache, 0),
        torch.tensor([-1, 17, -1]),
    )
    assert cache[0].count_nonzero() == 0
    assert cache[1].count_nonzero() == 2 * 3 * 64


@pytest.mark.parametrize(
    ("shape", "name"), [((4, 1, 2, 1, 12, 64), "block size"), ((4, 1, 2, 1, 16, 72), "dimensions")], ids=str
)
def test_a_cache_that_it_cannot_read_is_refused_by_name(shape: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CacheLayer(torch.zeros(shape), 0).args()


def test_arguments_of_a_wrong_kind_are_refused_by_name() -> None:
    layer = CacheLayer(torch.zeros(2, 1, 2, 3, 16, 64), 0)
    key = torch.zeros(3, 3, 64)
    slots = torch.zeros(3, dtype=torch.int64)
    for name, arguments in {
        "key": (key[:, :2], key, layer, slots),
        "value": (key, key.bfloat16(), layer, slots),
        "slots": (key, key, layer, slots.int()),
    }.items():
        with pytest.raises(ValueError, match=name):
            store(compiled.thread_pool(), *arguments)
