"""The compiled attention against the reference. Cache slots that no query may read hold invalid values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled
import quire_kernels.cpu.attention
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.attention import CacheLayer, attend, store
from quire_kernels.kv_quantization import quantize
from quire_kernels.paged_attention import paged_attention_reference
from worker_svc.cache import CacheShape, KVCache

BORDERS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 111, 128, 129, 257]


def layer_of(cache: KVCache, number: int) -> CacheLayer:
    views = cache.layers[number]
    return CacheLayer(views.keys, views.values, views.key_scales, views.value_scales)


def only_layer(numbers: Tensor) -> CacheLayer:
    """Of a cache [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
    return CacheLayer(*numbers.unbind(1))


@dataclass(frozen=True)
class Arithmetic:
    """What computes, and whether the cache is in 8 bits."""

    dtype: torch.dtype
    use_amx: bool
    in_8_bits: bool

    def cache(self, batch: Any) -> CacheLayer:
        """The batch's cache in the layout of the compiled ops, in the second of three layers, NaN elsewhere."""
        num_blocks, num_kv_heads, block_size, head_dim = batch.key_cache.shape
        shape = CacheShape.of_equal_layers(
            3, num_kv_heads, block_size, head_dim, torch.int8 if self.in_8_bits else self.dtype
        )
        cache = shape.allocate(num_blocks, torch.device("cpu"))
        for each in cache.layers:
            for numbers in (each.keys, each.values):
                numbers.fill_(127 if self.in_8_bits else math.nan)
            for scales in (each.key_scales, each.value_scales):
                if scales is not None:
                    scales.fill_(math.nan)
        layer = layer_of(cache, 1)
        for table, context in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
            position = torch.arange(context)
            blocks, offsets = table[position // block_size].long(), position % block_size
            key, value = batch.key_cache[blocks, :, offsets], batch.value_cache[blocks, :, offsets]
            store(compiled.thread_pool(), key, value, layer, blocks * block_size + offsets)
        return layer

    def attention(self, batch: Any, **options: Any) -> Tensor:
        return attend(
            compiled.thread_pool(),
            batch.query.contiguous(),
            self.cache(batch),
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            batch.scale,
            use_amx=self.use_amx,
            **options,
        )

    def reference(self, batch: Any, **options: Any) -> Tensor:
        """In 8 bits of the numbers that codes mean, in the precision of the others."""
        arguments = batch.arguments() | options
        if self.in_8_bits:
            arguments |= {name: _numbers_of_codes(arguments[name]) for name in ("key_cache", "value_cache")}
            arguments["query"] = batch.query.float()
        return paged_attention_reference(**arguments).to(self.dtype)


def _numbers_of_codes(vectors: Tensor) -> Tensor:
    """What is stored of vectors in 8 bits. Halves are rounded to even."""
    vectors = vectors.float()
    largest = vectors.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, 127)  # a number / a tensor would be rounded twice
    return (vectors * (most / largest.clamp(min=1e-30))).round() * (largest / 127)


@pytest.fixture(params=["float32", "bfloat16", "amx", "float32, 8 bits", "bfloat16, 8 bits", "amx, 8 bits"])
def arithmetic(request: pytest.FixtureRequest) -> Arithmetic:
    name, _, bits = request.param.partition(", ")
    if name == "amx" and not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    return Arithmetic(torch.float32 if name == "float32" else torch.bfloat16, name == "amx", bool(bits))


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (1, 8), (3, 3), (8, 4), (32, 1), (1, 49)], ids=str)
def test_attention_of_every_shape(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    arithmetic: Arithmetic,
) -> None:
    batch = make_batch([(1, 17), (1, 64), (33, 70), (1, 1), (5, 129)], heads, head_dim, block_size, arithmetic.dtype)
    assert_close(arithmetic.attention(batch), arithmetic.reference(batch))


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
    arithmetic: Arithmetic,
) -> None:
    batch = make_batch(sequences, (2, 3), 64, block_size, arithmetic.dtype)
    assert_close(arithmetic.attention(batch), arithmetic.reference(batch))


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 20}, {"window": 64}, {"soft_cap": 2.0}], ids=str)
def test_windows_and_soft_caps(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    options: dict[str, Any],
    arithmetic: Arithmetic,
) -> None:
    batch = make_batch([(1, context) for context in BORDERS] + [(100, 300), (40, 40)], (2, 3), dtype=arithmetic.dtype)
    assert_close(arithmetic.attention(batch, **options), arithmetic.reference(batch, **options))


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 20}, {"window": 64}, {"soft_cap": 2.0}], ids=str)
def test_queries_may_see_later_keys(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], options: dict[str, Any], arithmetic: Arithmetic
) -> None:
    """The newest tokens see all of their sequence, or as many keys of a window on either side."""
    sequences = [(context, context) for context in BORDERS] + [(100, 300), (40, 40)]
    batch = make_batch(sequences, (2, 3), dtype=arithmetic.dtype)
    found = arithmetic.attention(batch, bidirectional=True, **options)
    assert_close(found, _in_both_directions(batch, arithmetic, **options))


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("heads", [(2, 3), (8, 4), (1, 49), (32, 1)], ids=str)
def test_sinks_take_a_part_of_the_weights(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    heads: tuple[int, int],
    options: dict[str, Any],
    arithmetic: Arithmetic,
) -> None:
    sequences = [(1, context) for context in BORDERS] + [(100, 300), (40, 40)]
    batch = make_batch(sequences, heads, dtype=arithmetic.dtype, sinks=True)
    with_sinks = arithmetic.attention(batch, sinks=batch.sinks, **options)
    assert_close(with_sinks, arithmetic.reference(batch, **options))
    without = arithmetic.attention(batch, **options)
    assert (with_sinks - without).abs().max() > 0.05
    none = torch.full_like(batch.sinks, -math.inf)
    assert torch.equal(arithmetic.attention(batch, sinks=none, **options), without)


def test_queries_that_see_later_keys_may_have_sinks(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], arithmetic: Arithmetic
) -> None:
    batch = make_batch([(context, context) for context in BORDERS], (2, 3), dtype=arithmetic.dtype, sinks=True)
    found = arithmetic.attention(batch, bidirectional=True, sinks=batch.sinks)
    assert_close(found, _in_both_directions(batch, arithmetic, sinks=batch.sinks))


@pytest.mark.parametrize("sink", [-1e4, -200.0, 200.0, 1e4])
def test_sinks_of_any_size(make_batch: Callable[..., Any], sink: float, arithmetic: Arithmetic) -> None:
    """One that is far below all scores changes nothing; of one that is far above them the output is zero."""
    batch = make_batch([(1, 40), (33, 300)], (1, 2), dtype=arithmetic.dtype)
    output = arithmetic.attention(batch, sinks=torch.full((2,), sink))
    without = arithmetic.attention(batch)
    assert torch.equal(output, without) if sink < 0 else not output.any()


def _in_both_directions(
    batch: Any,
    arithmetic: Arithmetic,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in plain torch, in float32."""
    block_size, outputs = batch.key_cache.shape[2], []
    for number, table in enumerate(batch.block_tables):
        first, last = batch.query_starts[number : number + 2].tolist()
        position = torch.arange(int(batch.context_lens[number]))
        blocks, offsets = table[position // block_size].long(), position % block_size
        stored = [cache[blocks, :, offsets] for cache in (batch.key_cache, batch.value_cache)]
        keys, values = (_numbers_of_codes(one) if arithmetic.in_8_bits else one.float() for one in stored)
        queries = batch.query[first:last].float()
        group = queries.shape[1] // keys.shape[1]
        keys, values = (one.repeat_interleave(group, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * batch.scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if window is not None:
            distance = (position[-(last - first) :, None] - position).abs()
            scores = scores.masked_fill(distance >= window, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, last - first, 1)), -1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(position)], values))
    return torch.cat(outputs).to(arithmetic.dtype)


def test_a_query_gathers_the_same_bits_however_its_sequence_is_cut(
    make_batch: Callable[..., Any], arithmetic: Arithmetic
) -> None:
    batch = make_batch([(130, 333), (1, 700), (64, 64)], (2, 3), dtype=arithmetic.dtype, sinks=True)
    layer, query = arithmetic.cache(batch), batch.query.contiguous()
    together = arithmetic.attention(batch, sinks=batch.sinks)
    for first, last in ((0, 1), (1, 60), (60, 130)):
        alone = attend(
            compiled.thread_pool(),
            query[first:last],
            layer,
            batch.block_tables[:1],
            torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([333 - 130 + last], dtype=torch.int32),
            batch.scale,
            sinks=batch.sinks,
            use_amx=arithmetic.use_amx,
        )
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("size", [1, 3])
def test_the_number_of_threads_changes_nothing(
    make_batch: Callable[..., Any], size: int, arithmetic: Arithmetic
) -> None:
    batch = make_batch([(130, 333), (1, 700), (64, 64)], (2, 3), dtype=arithmetic.dtype)
    arguments = (arithmetic.cache(batch), batch.block_tables, batch.query_starts, batch.context_lens, batch.scale)
    query = batch.query.contiguous()
    assert torch.equal(
        attend(compiled.thread_pool(size), query, *arguments, use_amx=arithmetic.use_amx),
        attend(compiled.thread_pool(), query, *arguments, use_amx=arithmetic.use_amx),
    )


def test_amx_is_refused_where_it_cannot_be_used(
    make_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="use_amx: must be false for another dtype than bfloat16"):
        Arithmetic(torch.float32, use_amx=True, in_8_bits=False).attention(make_batch([(1, 9)], (1, 1)))
    monkeypatch.setattr(quire_kernels.cpu.attention, "has_amx", lambda _: False)
    batch = make_batch([(1, 9)], (1, 1), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="use_amx: must be false on a processor without AMX"):
        Arithmetic(torch.bfloat16, use_amx=True, in_8_bits=False).attention(batch)


def test_what_is_stored_in_8_bits_is_what_triton_stores() -> None:
    torch.manual_seed(0)
    key, value = torch.randn(20, 3, 64), torch.randn(20, 3, 64) * torch.tensor([0.0, 1e-3, 1e3])[:, None]
    cache = CacheShape.of_equal_layers(2, 3, 16, 64, torch.int8).allocate(4, torch.device("cpu"))
    store(compiled.thread_pool(), key, value, layer_of(cache, 1), torch.arange(20))
    other, written = cache.layers
    for vectors, stored, stored_scales in (
        (key, written.keys, written.key_scales),
        (value, written.values, written.value_scales),
    ):
        codes, scales = quantize(vectors, torch.int8)
        assert stored_scales is not None
        torch.testing.assert_close(stored_scales[:2].transpose(1, 2).flatten(0, 1)[:20], scales)
        # A block's codes are in an order of their own.
        for head in range(3):
            assert stored[0, head].flatten().sort().values.equal(codes[:16, head].flatten().sort().values)
    for untouched in (other.keys, other.values, other.key_scales, other.value_scales):
        assert untouched is not None
        assert not untouched.any()


def test_a_number_that_is_not_finite_poisons_its_own_vector() -> None:
    key = torch.ones(3, 1, 64)
    key[1, 0, 5] = math.inf
    cache = CacheShape.of_equal_layers(1, 1, 16, 64, torch.int8).allocate(1, torch.device("cpu"))
    layer, slots = layer_of(cache, 0), torch.arange(3)
    store(compiled.thread_pool(), key, torch.ones(3, 1, 64), layer, slots)
    assert layer.key_scales is not None
    assert layer.value_scales is not None
    assert layer.key_scales[0, 0, :3].isnan().tolist() == [False, True, False]
    assert not layer.value_scales[0].isnan().any()


def test_tokens_without_a_slot_are_not_stored() -> None:
    cache = torch.zeros(2, 2, 3, 16, 64)
    store(
        compiled.thread_pool(),
        torch.ones(3, 3, 64),
        torch.ones(3, 3, 64),
        only_layer(cache),
        torch.tensor([-1, 17, -1]),
    )
    assert cache[0].count_nonzero() == 0
    assert cache[1].count_nonzero() == 2 * 3 * 64


@pytest.mark.parametrize(
    ("shape", "name"), [((4, 2, 1, 12, 64), "block size"), ((4, 2, 1, 16, 72), "dimensions")], ids=str
)
def test_a_cache_that_it_cannot_read_is_refused_by_name(shape: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        only_layer(torch.zeros(shape)).args(torch.float32)


def test_arguments_of_a_wrong_kind_are_refused_by_name() -> None:
    layer = only_layer(torch.zeros(2, 2, 3, 16, 64))
    key = torch.zeros(3, 3, 64)
    slots = torch.zeros(3, dtype=torch.int64)
    for name, arguments in {
        "key": (key[:, :2], key, layer, slots),
        "value": (key, key.bfloat16(), layer, slots),
        "slots": (key, key, layer, slots.int()),
    }.items():
        with pytest.raises(ValueError, match=name):
            store(compiled.thread_pool(), *arguments)


def test_values_that_are_not_behind_their_keys_are_refused() -> None:
    keys, values = torch.zeros(2, 2, 3, 16, 64).unbind(1)
    for layer in (CacheLayer(values, keys), CacheLayer(keys, values.clone()), CacheLayer(keys, values[:, :2])):
        with pytest.raises(ValueError, match=r"^values: must be right behind keys"):
            layer.args(torch.float32)


def test_sinks_of_other_heads_are_refused(make_batch: Callable[..., Any], arithmetic: Arithmetic) -> None:
    batch = make_batch([(1, 9)], (2, 3), dtype=arithmetic.dtype)
    for sinks in (torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(12)[::2]):
        with pytest.raises(ValueError, match=r"^sinks: must be float32 \[num_heads\], contiguous"):
            arithmetic.attention(batch, sinks=sinks)


def test_a_window_of_no_token_is_refused() -> None:
    layer, numbers = only_layer(torch.zeros(1, 2, 3, 16, 64)), torch.tensor([[0, 1]], dtype=torch.int32)
    arguments = (torch.zeros(1, 3, 64), layer, numbers[:, :1], numbers[0], numbers[0, 1:])
    with pytest.raises(ValueError, match=r"^window: "):
        attend(compiled.thread_pool(), *arguments, 1.0, window=0)
