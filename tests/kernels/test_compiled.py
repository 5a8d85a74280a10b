"""The compiled ops against references, over a cache that is poisoned wherever no query may look."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import compiled
from quire_kernels.cpu.attention import CacheLayer, attend, store
from quire_kernels.cpu.library import CannotBuild, load_library
from quire_kernels.cpu.linear import linear, pack_matrix
from quire_kernels.cpu.sample import DRAW, draw, likeliest
from quire_kernels.paged_attention import paged_attention_reference
from worker_svc.philox import uniforms
from worker_svc.sampler import SamplingState, draw_tokens
from worker_svc.step import SamplingParams

BORDERS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 111, 128, 129, 257]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def device() -> str:
    return "cpu"


def compiled_cache(batch: Any) -> CacheLayer:
    """The batch's cache as the compiled ops lay it out, in the second of three layers, NaN where nothing is stored."""
    num_blocks, num_kv_heads, block_size, head_dim = batch.key_cache.shape
    cache = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=batch.query.dtype)
    layer = CacheLayer(cache, 1)
    for table, context in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        position = torch.arange(context)
        blocks, offsets = table[position // block_size].long(), position % block_size
        key, value = batch.key_cache[blocks, :, offsets], batch.value_cache[blocks, :, offsets]
        store(compiled.team(), key, value, layer, blocks * block_size + offsets)
    return layer


def attention(batch: Any, **options: Any) -> Tensor:
    return attend(
        compiled.team(),
        batch.query.contiguous(),
        compiled_cache(batch),
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.scale,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (1, 8), (3, 3), (8, 4), (32, 1), (1, 49)], ids=str)
def test_attention_of_every_shape(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    batch = make_batch([(1, 17), (1, 64), (33, 70), (1, 1), (5, 129)], heads, head_dim, block_size, dtype)
    assert_close(attention(batch), paged_attention_reference(**batch.arguments()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    dtype: torch.dtype,
) -> None:
    batch = make_batch(sequences, (2, 3), 64, block_size, dtype)
    assert_close(attention(batch), paged_attention_reference(**batch.arguments()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"window": 1}, {"window": 20}, {"window": 64}, {"soft_cap": 2.0}], ids=str)
def test_windows_and_soft_caps(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    batch = make_batch([(1, context) for context in BORDERS] + [(100, 300), (40, 40)], (2, 3), dtype=dtype)
    assert_close(attention(batch, **options), paged_attention_reference(**(batch.arguments() | options)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_gathers_the_same_bits_however_its_sequence_is_cut(
    make_batch: Callable[..., Any], dtype: torch.dtype
) -> None:
    batch = make_batch([(130, 333), (1, 700), (64, 64)], (2, 3), dtype=dtype)
    layer, query = compiled_cache(batch), batch.query.contiguous()
    together = attention(batch)
    for first, last in ((0, 1), (1, 60), (60, 130)):
        alone = attend(
            compiled.team(),
            query[first:last],
            layer,
            batch.block_tables[:1],
            torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([333 - 130 + last], dtype=torch.int32),
            batch.scale,
        )
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("size", [1, 3])
def test_the_number_of_threads_changes_nothing(make_batch: Callable[..., Any], size: int) -> None:
    batch = make_batch([(130, 333), (1, 700), (64, 64)], (2, 3))
    arguments = (compiled_cache(batch), batch.block_tables, batch.query_starts, batch.context_lens, batch.scale)
    query = batch.query.contiguous()
    assert torch.equal(attend(compiled.team(size), query, *arguments), attend(compiled.team(), query, *arguments))


def test_tokens_without_a_slot_are_not_stored() -> None:
    cache = torch.zeros(2, 1, 2, 3, 16, 64)
    store(compiled.team(), torch.ones(3, 3, 64), torch.ones(3, 3, 64), CacheLayer(cache, 0), torch.tensor([-1, 17, -1]))
    assert cache[0].count_nonzero() == 0
    assert cache[1].count_nonzero() == 2 * 3 * 64


@pytest.mark.parametrize("rows", [1, 2, 13, 14, 15, 29, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (48, 97), (49, 31), (576, 960), (1536, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    x = torch.randn(rows, inputs).to(dtype)
    product = linear(compiled.team(), x, pack_matrix(compiled.team(), weight, bias))
    torch.testing.assert_close(product.double(), x.double() @ weight.double().t() + bias, rtol=1e-4, atol=1e-4)
    alone = linear(compiled.team(), x[-1:], pack_matrix(compiled.team(), weight, bias))
    assert torch.equal(alone, product[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_weights_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 576).to(dtype)
    weight[3] = 0
    identity = torch.eye(576, dtype=dtype)
    restored = linear(compiled.team(), identity, pack_matrix(compiled.team(), weight, int8=True)).t()
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert bool(((restored - weight.float()).abs() <= step * 0.501).all())


@pytest.mark.parametrize(
    ("shape", "name"), [((4, 1, 2, 1, 12, 64), "block_size"), ((4, 1, 2, 1, 16, 72), "head_dim")], ids=str
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
            store(compiled.team(), *arguments)
    with pytest.raises(ValueError, match="dtype"):
        pack_matrix(compiled.team(), torch.zeros(2, 2, dtype=torch.float16))


def test_a_library_is_built_once_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho "$@" >>"$0.log"\nexec c++ -O0 "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    told: list[str] = []
    for _ in range(2):
        assert isinstance(load_library(tmp_path / "kernels", told.append), ctypes.CDLL)
    assert len(told) == 1
    assert (tmp_path / "c++.log").read_text().count("library.cpp") == 1
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_a_compiler_that_is_missing_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(CannotBuild, match="nothing"):
        load_library(tmp_path)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(CannotBuild, match="failed"):
        load_library(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(CannotBuild, match="apt install"):
        load_library(tmp_path)


KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.01},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond": {"top_k": 10**9},
    "top_p": {"top_p": 0.8},
    "top_p of little": {"top_p": 1e-9},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("vocab", [1, 7, 63, 97, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_draws_are_the_samplers(kind: dict[str, Any], vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(24, vocab).mul_(3)
    logits[3] = 0.5  # all alike
    logits[4, vocab // 2 :] = logits[4, : vocab - vocab // 2].clone()  # ties
    states = [
        SamplingState(SamplingParams(**({"temperature": 1.0} | kind), seed=row), 0, np.zeros(3, np.int32), 3)
        for row in range(len(logits))
    ]
    numbers = uniforms(np.arange(24, dtype=np.uint64), np.zeros(24, np.uint32), np.full(24, 3, np.uint32))
    draws = np.zeros(24, DRAW)
    for name, value in ({"temperature": 1.0, "top_p": 1.0} | kind).items():
        draws[name] = value
    draws["number"] = numbers
    drawn = draw(compiled.team(), logits, np.arange(24), draws)
    assert drawn.tolist() == draw_tokens(logits.clone(), states).tokens


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = np.zeros(2000, DRAW)
    draws["temperature"] = draws["top_p"] = 1.0
    draws["number"] = (np.arange(2000) + 0.5) / 2000
    drawn = draw(compiled.team(), weights.log()[None], np.zeros(2000, np.int64), draws)
    assert np.bincount(drawn, minlength=4).tolist() == [1000, 0, 600, 400]
    assert drawn.tolist() == sorted(drawn)


@pytest.mark.parametrize("place", [0, 40, 96])
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_row_with_a_fault_draws_nothing(fault: float, place: int) -> None:
    logits = torch.zeros(3, 97)
    logits[:, 50] = 1.0
    logits[1, place] = fault
    draws = np.zeros(3, DRAW)
    draws["temperature"] = draws["top_p"] = 1.0
    assert likeliest(compiled.team(), logits).tolist() == [50, -1, 50]
    assert (draw(compiled.team(), logits, np.arange(3), draws) < 0).tolist() == [False, True, False]


def test_the_first_of_the_likeliest_is_taken() -> None:
    logits = torch.zeros(4, 97)
    for row, token in enumerate((0, 15, 16, 96)):
        logits[row, token:] = 2.5
    assert likeliest(compiled.team(), logits).tolist() == [0, 15, 16, 96]
    logits[2, 3] = float("-inf")
    assert likeliest(compiled.team(), logits).tolist() == [0, 15, -1, 96]


def test_suppressed_tokens_are_never_drawn() -> None:
    logits = torch.full((2, 97), float("-inf"))
    logits[0, 33] = -5.0
    draws = np.zeros(2, DRAW)
    draws["temperature"], draws["top_p"], draws["number"] = 1.0, 0.5, 0.999
    assert draw(compiled.team(), logits, np.arange(2), draws).tolist() == [33, -1]
