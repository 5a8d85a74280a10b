"""Calls of the ops that have a reference of the same arguments: `benchmarks.gpu.correct` makes each with both."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.op_call import Arguments, OpCall, Sizes, name_of
from benchmarks.gpu.quantized_calls import quantized_calls


def op_calls(device: torch.device, dtype: torch.dtype, *, small: bool) -> Iterator[OpCall]:
    """One call or more of each op, in `dtype` where it computes in 16 bits."""
    size = Sizes(device, dtype, small)
    yield from _cache_calls(size)
    yield from _latent_calls(size)
    yield from _norm_calls(size)
    yield from _rotary_calls(size)
    yield from _layer_input_calls(size)
    yield from _expert_calls(size)
    yield from quantized_calls(size)
    yield from _logit_calls(size)


def _cache_calls(size: Sizes) -> Iterator[OpCall]:
    from quire_kernels.block_copy import block_copy, block_copy_reference
    from quire_kernels.block_swap import swap_in, swap_in_reference, swap_out, swap_out_reference
    from quire_kernels.store_kv import store_kv, store_kv_reference
    from worker_svc.cache import CacheShape

    def store(kv: torch.dtype) -> Arguments:
        cache = CacheShape.of_equal_layers(2, 4, 16, 64, kv).allocate(8, size.device)
        cache.blocks.zero_()
        layer = cache.layers[1]
        slots = torch.randperm(8 * 16)[: size.num_tokens].to(size.device)
        rows = size.normal(2, size.num_tokens, 4, 64)
        scales = {"key_scales": layer.key_scales, "value_scales": layer.value_scales}
        return (rows[0], rows[1], layer.keys, layer.values, slots), scales

    for kv in (size.dtype, torch.float8_e4m3fn, torch.int8):
        # Triton's interpreter cuts codes of float8_e4m3fn off, where a GPU rounds.
        bound = 0.1 if kv == torch.float8_e4m3fn and size.device.type == "cpu" else OpCall.bound
        yield OpCall(f"store_kv in {name_of(kv)}", store_kv, store_kv_reference, lambda kv=kv: store(kv), bound)  # type: ignore[misc]

    def blocks(count: int) -> Tensor:
        return size.ints(256, count, 2048, dtype=torch.uint8)

    def copies() -> Arguments:
        pairs = torch.tensor([(0, 3), (5, 1), (2, 4)]).to(size.device)
        return (blocks(6), blocks(6), pairs), {}

    def swaps() -> Arguments:
        host = blocks(6).cpu()
        pairs = [(0, 3), (5, 1), (2, 4)]
        return (blocks(6), host.pin_memory() if size.device.type == "cuda" else host, pairs), {}

    def staged(swap: Callable[..., None]) -> Callable[..., None]:
        """With memory for two blocks, which a reference does not use."""
        staging = torch.empty(2, 2048, dtype=torch.uint8, device=size.device)
        return lambda *arguments: swap(*arguments, staging)

    yield OpCall("block_copy", block_copy, block_copy_reference, copies)
    yield OpCall("swap_out", staged(swap_out), swap_out_reference, swaps)
    yield OpCall("swap_in", staged(swap_in), swap_in_reference, swaps)


def _latent_calls(size: Sizes) -> Iterator[OpCall]:
    from paged_batches import make_batch
    from quire_kernels.decode_plan import DecodePlan
    from quire_kernels.head_linear import head_linear, head_linear_reference
    from quire_kernels.latent_attention import (
        latent_attention,
        latent_attention_reference,
        latent_queries_per_tile,
    )
    from quire_kernels.latent_decode import latent_decode, latent_decode_reference, latent_splits
    from quire_kernels.latent_store import latent_store, latent_store_reference
    from quire_kernels.prefill_tiles import PrefillTiles
    from quire_kernels.row_norm import RowNorm
    from worker_svc.cache import CacheShape

    num_heads, rank, rotated = (4, 32, 16) if size.small else (16, 512, 64)
    contexts = (1, 17, 33) if size.small else (1, 16, 17, 65, 129, 1000, 4097)

    def attention(kv: torch.dtype | None, *, is_decode: bool) -> Arguments:
        sequences = [(1 if is_decode else min(context, 19), context) for context in contexts]
        batch = make_batch(
            sequences, (1, num_heads), rank + rotated, dtype=size.dtype, cache_dtype=kv, device=size.device.type
        )
        named: dict[str, Any] = {"key_scales": batch.key_scales}
        if not is_decode:
            layout = batch.block_tables, batch.query_starts, batch.context_lens
            how = num_heads, rank, rotated, size.dtype, batch.key_cache.dtype, size.device
            starts, lengths = batch.query_starts.cpu().numpy(), batch.context_lens.cpu().numpy()
            queries = latent_queries_per_tile(*how)
            named["tiles"] = PrefillTiles.make(starts, lengths, len(batch.query), queries, size.device)
            return (batch.query, batch.key_cache, *layout, rank, batch.scale), named
        splits = latent_splits(num_heads, rank, rotated, size.dtype, batch.key_cache.dtype, size.device)
        plan = DecodePlan.make(splits, batch.context_lens.cpu().numpy(), size.device)
        return (batch.query, batch.key_cache, batch.block_tables, batch.context_lens, plan, rank, batch.scale), named

    for kv in (None, torch.float8_e4m3fn, torch.int8):
        name = f"keys in {name_of(kv or size.dtype)}"
        yield OpCall(
            f"latent_attention, {name}",
            latent_attention,
            latent_attention_reference,
            lambda kv=kv: attention(kv, is_decode=False),  # type: ignore[misc]
        )
        yield OpCall(
            f"latent_decode, {name}",
            latent_decode,
            latent_decode_reference,
            lambda kv=kv: attention(kv, is_decode=True),  # type: ignore[misc]
        )

    def store() -> Arguments:
        layer = (
            CacheShape.of_equal_layers(2, 1, 16, rank + rotated, size.dtype, keys_hold_values=True)
            .allocate(8, size.device)
            .layers[1]
        )
        layer.keys.zero_()
        slots = torch.randperm(8 * 16)[: size.num_tokens].to(size.device)
        return (
            size.normal(size.num_tokens, rank + rotated),
            size.normal(size.num_tokens, num_heads, rotated),
            size.ints(1000, size.num_tokens),
            (10000.0 ** -(torch.arange(rotated // 2) / (rotated // 2))).to(size.device),
            RowNorm(size.normal(rank), 1e-6),
            layer.keys,
            slots,
            torch.zeros(size.num_tokens, num_heads, rank + rotated, dtype=size.dtype, device=size.device),
        ), {"rotates_neighbours": True}

    def heads() -> Arguments:
        return (size.normal(size.num_tokens, num_heads, rank), size.normal(num_heads, rotated, rank)), {}

    yield OpCall("latent_store", latent_store, latent_store_reference, store)
    yield OpCall("head_linear", head_linear, head_linear_reference, heads)


def _norm_calls(size: Sizes) -> Iterator[OpCall]:
    from quire_kernels.post_norm import post_norm, post_norm_reference
    from quire_kernels.prompt_attention import prompt_attention, prompt_attention_reference
    from quire_kernels.row_norm import RowNorm, add_row_norm, add_row_norm_reference, row_norm, row_norm_reference

    def norm(*, is_centered: bool) -> RowNorm:
        return RowNorm(size.normal(size.width), 1e-5, size.normal(size.width) if is_centered else None, is_centered)

    def added(*, is_centered: bool, **how: Any) -> Arguments:
        hidden = size.normal(size.num_tokens, size.width, dtype=torch.float32)
        return (hidden, size.normal(size.num_tokens, size.width), norm(is_centered=is_centered), size.dtype), how

    def scaled() -> Arguments:
        return added(is_centered=False, update_norm=norm(is_centered=False), sum_scale=0.3)

    def prompts() -> Arguments:
        qkv = size.normal(max(30, 2 * size.num_tokens), 3 * 4 * 64)
        return (qkv, torch.tensor([0, 1, 18, len(qkv)], dtype=torch.int32).to(size.device), 4), {}

    def rows() -> Arguments:
        return (size.normal(size.num_tokens, size.width), norm(is_centered=False), size.dtype), {}

    yield OpCall("row_norm", row_norm, row_norm_reference, rows)
    yield OpCall("add_row_norm", add_row_norm, add_row_norm_reference, lambda: added(is_centered=False))
    yield OpCall("add_row_norm, centered", add_row_norm, add_row_norm_reference, lambda: added(is_centered=True))
    yield OpCall("add_row_norm, scaled", add_row_norm, add_row_norm_reference, scaled)
    yield OpCall("post_norm", post_norm, post_norm_reference, lambda: added(is_centered=True))
    yield OpCall("prompt_attention", prompt_attention, prompt_attention_reference, prompts)


def _rotary_calls(size: Sizes) -> Iterator[OpCall]:
    """With norms of values, values that are keys, and queries alone."""
    from quire_kernels.rotary_store import HeadNorm, rotary_store, rotary_store_reference
    from quire_kernels.rotate_queries import rotate_queries, rotate_queries_reference
    from quire_kernels.row_norm import RowNorm
    from worker_svc.cache import CacheShape

    num_heads, head_dim = 4, 32 if size.small else 512

    def turned() -> tuple[Tensor, Tensor]:
        """Positions and frequencies."""
        frequencies = 10000.0 ** -(torch.arange(head_dim // 4) / (head_dim // 4))
        return size.ints(1000, size.num_tokens), frequencies.to(size.device)

    def stored(kv: torch.dtype, *, values_are_keys: bool) -> Arguments:
        cache = CacheShape.of_equal_layers(2, 2, 16, head_dim, kv).allocate(8, size.device)
        cache.blocks.zero_()
        layer = cache.layers[1]
        qkv = size.normal(size.num_tokens, (num_heads + (2 if values_are_keys else 4)) * head_dim)
        slots = torch.randperm(8 * 16)[: size.num_tokens].to(size.device)
        named: dict[str, Any] = {
            "norm": HeadNorm(size.normal(head_dim), size.normal(head_dim), 1e-6, 1e-6),
            "value_epsilon": 1e-6,
            "values_are_keys": values_are_keys,
            "key_scales": layer.key_scales,
            "value_scales": layer.value_scales,
        }
        return (qkv, *turned(), layer.keys, layer.values, slots), named

    def queries() -> Arguments:
        query = size.normal(size.num_tokens, num_heads * head_dim)
        return (query, *turned(), head_dim), {"norm": RowNorm(size.normal(head_dim), 1e-6)}

    for kv in (size.dtype, torch.int8):
        for values_are_keys in (False, True):
            name = f"rotary_store in {name_of(kv)}" + (", values that are keys" if values_are_keys else "")
            make = partial(stored, kv, values_are_keys=values_are_keys)
            yield OpCall(name, rotary_store, rotary_store_reference, make)
    yield OpCall("rotate_queries", rotate_queries, rotate_queries_reference, queries)


def _layer_input_calls(size: Sizes) -> Iterator[OpCall]:
    from quire_kernels.activation import Activation, activation_product, activation_product_reference
    from quire_kernels.layer_vectors import layer_vectors, layer_vectors_reference
    from quire_kernels.row_norm import RowNorm

    num_layers, width = (3, 24) if size.small else (42, 256)

    def vectors() -> Arguments:
        ids, sampled = size.ints(100, size.num_tokens) - 3, size.ints(100, 3)
        embedding = size.normal(100, num_layers * width)
        norm = RowNorm(size.normal(width), 1e-6)
        projected = size.normal(size.num_tokens, num_layers * width)
        return (ids, sampled, embedding, projected, norm), {"embedding_scale": 16.0, "scale": 0.5**0.5}

    def product() -> Arguments:
        of_layers = size.normal(size.num_tokens, num_layers, width)
        return (size.normal(size.num_tokens, width), of_layers[:, 1], Activation.GELU_TANH), {}

    yield OpCall("layer_vectors", layer_vectors, layer_vectors_reference, vectors)
    yield OpCall("activation_product", activation_product, activation_product_reference, product)


def _expert_calls(size: Sizes) -> Iterator[OpCall]:
    from quire_kernels.activation import Activation
    from quire_kernels.choose_experts import Groups, choose_experts, choose_experts_reference
    from quire_kernels.combine_experts import combine_experts, combine_experts_reference
    from quire_kernels.group_by_expert import ExpertGroups, group_by_expert, group_by_expert_reference
    from quire_kernels.grouped_linear import choose_tile_rows, grouped_linear, grouped_linear_reference

    num_experts, num_chosen = (8, 2) if size.small else (64, 6)
    num_rows = size.num_tokens * num_chosen
    tile_rows = choose_tile_rows(num_rows, num_experts, size.dtype, deterministic=False)

    def experts() -> Tensor:
        choices = torch.rand(size.num_tokens, num_experts).topk(num_chosen).indices
        return choices.to(size.device, torch.int32)

    def scores(*, grouped: bool) -> Arguments:
        values = size.normal(size.num_tokens, num_experts, dtype=torch.float32)
        named: dict[str, Any] = {"normalized": True, "scale": 2.5}
        if grouped:
            bias = size.normal(num_experts, dtype=torch.float32)
            named |= {"sigmoid": True, "bias": bias, "groups": Groups(4, 2, 2)}
        return (values, num_experts, num_chosen), named

    def product() -> Arguments:
        groups = group_by_expert_reference(experts(), num_experts, tile_rows)
        weight = size.normal(num_experts, 2 * 96, size.width) * size.width**-0.5
        return (size.normal(size.num_tokens, size.width), weight, groups, num_rows, Activation.SILU), {}

    def combined() -> Arguments:
        weights = torch.rand(size.num_tokens, num_chosen).to(size.device)
        return (size.normal(num_rows, size.width), weights, size.normal(size.num_tokens, size.width)), {}

    yield OpCall("choose_experts", choose_experts, choose_experts_reference, lambda: scores(grouped=False))
    yield OpCall("choose_experts in groups", choose_experts, choose_experts_reference, lambda: scores(grouped=True))

    def used(group: Callable[..., ExpertGroups]) -> Callable[..., list[Tensor]]:
        """Without the tiles of no expert, whose rows mean nothing."""

        def tiles(*arguments: Any) -> list[Tensor]:
            groups = group(*arguments)
            is_used = groups.tile_experts >= 0
            return [groups.order.view(-1, tile_rows)[is_used], groups.tile_experts]

        return tiles

    yield OpCall(
        "group_by_expert",
        used(group_by_expert),
        used(group_by_expert_reference),
        lambda: ((experts(), num_experts, tile_rows), {}),
    )
    yield OpCall("grouped_linear", grouped_linear, grouped_linear_reference, product)
    yield OpCall("combine_experts", combine_experts, combine_experts_reference, combined)


def _logit_calls(size: Sizes) -> Iterator[OpCall]:
    from quire_kernels.adjust_logits import LogitEntries, Penalties, adjust_logits, adjust_logits_reference
    from quire_kernels.logits_epilogue import logits_epilogue, logits_epilogue_reference
    from quire_kernels.mask_logits import mask_logits, mask_logits_reference

    rows, vocab_size = 6, 300 if size.small else 128256

    def logits() -> Tensor:
        return size.normal(rows, vocab_size, dtype=torch.float32)

    def changes() -> Arguments:
        entries = LogitEntries(
            torch.tensor([0, 2, 2, -1], dtype=torch.int32).to(size.device),
            torch.tensor([7, 1, 5, 0], dtype=torch.int32).to(size.device),
            torch.tensor([3.0, -2.0, float("-inf"), 0.0]).to(size.device),
        )
        counts = size.ints(3, 4, vocab_size, dtype=torch.int32)
        slots = torch.tensor([-1, 0, 1, -1, 2, 3]).to(size.device)
        factors = (1 + torch.rand(3, rows)).to(size.device)
        return (logits(), entries, Penalties(slots, factors[0], factors[1], factors[2], counts)), {}

    def masks() -> Arguments:
        places = torch.tensor([1, 4]).to(size.device)
        bits = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32))).to(size.device, torch.int32)
        return (logits(), places, bits), {}

    yield OpCall("adjust_logits", adjust_logits, adjust_logits_reference, changes)
    yield OpCall("mask_logits", mask_logits, mask_logits_reference, masks)
    yield OpCall(
        "logits_epilogue",
        logits_epilogue,
        logits_epilogue_reference,
        lambda: ((logits(), size.normal(vocab_size), 30.0), {}),
    )
