"""Cases of the ops around attention: embeddings, norms, rotary positions and the store, activations, sampling.

Peers are torch's own operators one after another, and the same compiled by torch.compile.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.case import KernelCase, Run
from benchmarks.kernels.device import Bound
from benchmarks.kernels.pages import BLOCK_SIZE, Heads

if TYPE_CHECKING:
    from quire_kernels.row_norm import RowNorm

_DTYPE = torch.bfloat16


def embed(device: torch.device, num_tokens: int, vocab_size: int, width: int) -> KernelCase:
    """Embeddings in float32, of tokens half of which the step before has just sampled."""
    from quire_kernels.embed_tokens import embed_tokens

    embedding = torch.randn(vocab_size, width, device=device, dtype=_DTYPE)
    sampled = torch.randint(vocab_size, (num_tokens,), device=device)
    token_ids = torch.randint(vocab_size, (num_tokens,), device=device)
    token_ids[::2] = -1 - torch.arange(num_tokens, device=device)[::2]

    def plain(tokens: Tensor) -> Tensor:
        known = torch.where(tokens < 0, sampled[(-1 - tokens).clamp(min=0)], tokens)
        return functional.embedding(known, embedding).float()

    def ours() -> object:
        return embed_tokens(token_ids, sampled, embedding)

    amount = num_tokens * width * (embedding.element_size() + 4)
    return KernelCase("embed_tokens", f"{num_tokens} × {width}", Bound.MEMORY, amount, ours, _torch(plain, token_ids))


def norm(device: torch.device, num_tokens: int, width: int) -> KernelCase:
    """An update in 16 bits is added to the float32 residual stream, which is normalised to 16 bits."""
    from quire_kernels.row_norm import RowNorm

    weight = torch.randn(width, device=device, dtype=_DTYPE)

    def plain(residual: Tensor, update: Tensor) -> Tensor:
        residual.add_(update)
        return functional.rms_norm(residual, (width,), weight.float(), 1e-5).to(_DTYPE)

    return _add_and_norm(device, num_tokens, width, "root mean square", RowNorm(weight, 1e-5), None, plain)


def layer_norm(device: torch.device, num_tokens: int, width: int) -> KernelCase:
    """The same with a layer norm."""
    from quire_kernels.row_norm import RowNorm

    weight, bias = torch.randn(2, width, device=device, dtype=_DTYPE)

    def plain(residual: Tensor, update: Tensor) -> Tensor:
        residual.add_(update)
        return functional.layer_norm(residual, (width,), weight.float(), bias.float(), 1e-5).to(_DTYPE)

    how = RowNorm(weight, 1e-5, bias, is_centered=True)
    return _add_and_norm(device, num_tokens, width, "layer norm", how, None, plain)


def norm_of_update(device: torch.device, num_tokens: int, width: int) -> KernelCase:
    """The update is normalised before it is added, as by Gemma 2 and 3."""
    from quire_kernels.row_norm import RowNorm

    weight, update_weight = torch.randn(2, width, device=device)

    def plain(residual: Tensor, update: Tensor) -> Tensor:
        residual.add_(functional.rms_norm(update.float(), (width,), update_weight, 1e-6))
        return functional.rms_norm(residual, (width,), weight, 1e-6).to(_DTYPE)

    norms = RowNorm(weight, 1e-6), RowNorm(update_weight, 1e-6)
    return _add_and_norm(device, num_tokens, width, "of the update too", *norms, plain)


def _add_and_norm(
    device: torch.device,
    num_tokens: int,
    width: int,
    kind: str,
    how: "RowNorm",
    update_norm: "RowNorm | None",
    plain: Callable[[Tensor, Tensor], Tensor],
) -> KernelCase:
    from quire_kernels.row_norm import add_row_norm

    hidden = torch.randn(num_tokens, width, device=device)
    update = torch.randn(num_tokens, width, device=device, dtype=_DTYPE) * 1e-3

    def ours() -> None:
        # Not returned: each call adds to the stream, so the result depends on the number of calls.
        add_row_norm(hidden, update, how, _DTYPE, update_norm=update_norm)

    peers = _torch(lambda residual: plain(residual, update), hidden.clone())
    amount = num_tokens * width * (4 + 4 + 2 + 2)
    return KernelCase("add_row_norm", f"{num_tokens} × {width}, {kind}", Bound.MEMORY, amount, ours, peers)


def activation(device: torch.device, num_tokens: int, width: int) -> KernelCase:
    """SiLU of the gate times up."""
    from quire_kernels.activation import Activation, gated_activation

    gate_up = torch.randn(num_tokens, 2 * width, device=device, dtype=_DTYPE)

    def plain(inputs: Tensor) -> Tensor:
        gate, up = inputs.chunk(2, -1)
        return functional.silu(gate) * up

    def ours() -> object:
        return gated_activation(gate_up, Activation.SILU)

    amount = 3 * num_tokens * width * gate_up.element_size()
    return KernelCase("gated_activation", f"{num_tokens} × {width}", Bound.MEMORY, amount, ours, _torch(plain, gate_up))


def gelu(device: torch.device, num_tokens: int, width: int) -> KernelCase:
    """GELU by the error function, of an MLP without a gate."""
    from quire_kernels.activation import Activation, plain_activation

    inputs = torch.randn(num_tokens, width, device=device, dtype=_DTYPE)

    def ours() -> object:
        return plain_activation(inputs, Activation.GELU)

    shape = f"{num_tokens} × {width}"
    return KernelCase("plain_activation", shape, Bound.MEMORY, 2 * inputs.nbytes, ours, _torch(functional.gelu, inputs))


def cap(device: torch.device, num_rows: int, vocab_size: int) -> KernelCase:
    """A soft cap of 30 on logits."""
    from quire_kernels.logits_epilogue import logits_epilogue

    logits = torch.randn(num_rows, vocab_size, device=device) * 10

    def plain(scores: Tensor) -> None:
        scores.copy_(30.0 * torch.tanh(scores / 30.0))

    def ours() -> None:
        # Not returned: each call caps the logits again.
        logits_epilogue(logits, soft_cap=30.0)

    shape = f"{num_rows} × {vocab_size}"
    peers = _torch(plain, logits.clone())
    return KernelCase("logits_epilogue", shape, Bound.MEMORY, 2 * logits.nbytes, ours, peers)


def rotary_8bit(device: torch.device, heads: Heads, num_tokens: int, dtype: torch.dtype) -> KernelCase:
    """The same into a cache in 8 bits, with a scale for each vector."""
    from quire_kernels.rotary_store import rotary_store

    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(num_tokens, width, device=device, dtype=_DTYPE)
    positions = torch.arange(num_tokens, device=device)
    frequencies = _frequencies(heads, device)
    keys, values, (key_scales, value_scales), slots = _cache_8bit(device, heads, num_tokens, dtype)
    how = partial(rotary_store, key_scales=key_scales, value_scales=value_scales)
    run = partial(how, qkv, positions, frequencies, keys, values, slots)
    query_bytes = num_tokens * heads.num_heads * heads.head_dim * qkv.element_size()
    amount = qkv.nbytes + query_bytes + _stored_bytes_8bit(heads, num_tokens)
    return KernelCase("rotary_store", f"{_kv_shape(heads, num_tokens)}, {_name(dtype)}", Bound.MEMORY, amount, run)


def rotary(device: torch.device, heads: Heads, num_tokens: int) -> KernelCase:
    """Rotates queries and keys, and stores keys and values."""
    from quire_kernels.rotary_store import rotary_store

    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(num_tokens, width, device=device, dtype=_DTYPE)
    positions = torch.arange(num_tokens, device=device)
    frequencies = _frequencies(heads, device)
    keys, values, slots = _cache(device, heads, num_tokens)

    def plain(inputs: Tensor) -> Tensor:
        rows = inputs.view(num_tokens, -1, heads.head_dim)
        num_turned = heads.num_heads + heads.num_kv_heads
        angles = positions[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        left, right = rows[:, :num_turned].float().chunk(2, -1)
        turned = torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(_DTYPE)
        _store(turned[:, heads.num_heads :], rows[:, num_turned:], keys, values, slots)
        return turned[:, : heads.num_heads].contiguous()

    def ours() -> object:
        return rotary_store(qkv, positions, frequencies, keys, values, slots)

    shape = f"{heads.num_kv_heads} × {heads.group} heads of {heads.head_dim}, {num_tokens} tokens"
    return KernelCase("rotary_store", shape, Bound.MEMORY, 2 * qkv.nbytes, ours, _torch(plain, qkv))


def store(device: torch.device, heads: Heads, num_tokens: int) -> KernelCase:
    """Stores keys and values."""
    from quire_kernels.store_kv import store_kv

    key, value = _new_kv(device, heads, num_tokens)
    keys, values, slots = _cache(device, heads, num_tokens)
    peers: dict[str, Run] = {"torch": lambda: _store(key, value, keys, values, slots)}
    shape = f"{heads.num_kv_heads} heads of {heads.head_dim}, {num_tokens} tokens"
    run = partial(store_kv, key, value, keys, values, slots)
    return KernelCase("store_kv", shape, Bound.MEMORY, 4 * key.nbytes, run, peers)


def store_8bit(device: torch.device, heads: Heads, num_tokens: int, dtype: torch.dtype) -> KernelCase:
    """Stores keys and values in 8 bits, with a scale for each vector."""
    from quire_kernels.kv_quantization import quantize
    from quire_kernels.store_kv import store_kv

    key, value = _new_kv(device, heads, num_tokens)
    keys, values, (key_scales, value_scales), slots = _cache_8bit(device, heads, num_tokens, dtype)

    def plain() -> None:
        (key_codes, scales_of_keys), (value_codes, scales_of_values) = quantize(key, dtype), quantize(value, dtype)
        _store(key_codes, value_codes, keys, values, slots)
        _store(scales_of_keys, scales_of_values, key_scales, value_scales, slots)

    run = partial(store_kv, key, value, keys, values, slots, key_scales=key_scales, value_scales=value_scales)
    amount = 2 * key.nbytes + _stored_bytes_8bit(heads, num_tokens)
    shape = f"{_kv_shape(heads, num_tokens)}, {_name(dtype)}"
    return KernelCase("store_kv", shape, Bound.MEMORY, amount, run, {"torch": plain})


def cpu_store(device: torch.device, heads: Heads, num_tokens: int) -> KernelCase:
    """The CPU's store in torch."""
    from quire_kernels.cpu_attention import cpu_store_kv

    key, value = _new_kv(device, heads, num_tokens)
    keys, values, slots = _cache(device, heads, num_tokens)
    run = partial(cpu_store_kv, key, value, keys, values, slots)
    shape = f"{heads.num_kv_heads} heads of {heads.head_dim}, {num_tokens} tokens"
    return KernelCase("cpu_store_kv", shape, Bound.MEMORY, 4 * key.nbytes, run)


def adjust(device: torch.device, num_rows: int, vocab_size: int, tokens_seen: int) -> KernelCase:
    """Bias of 64 tokens of each row, and penalties: all counts are read, logits of seen tokens written."""
    from quire_kernels.adjust_logits import LogitEntries, Penalties, adjust_logits

    logits = torch.randn(num_rows, vocab_size, device=device)
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
    counts.scatter_(1, torch.randint(vocab_size, (num_rows, tokens_seen), device=device), 1)
    rows = torch.arange(num_rows, device=device, dtype=torch.int32)
    tokens = torch.stack([torch.randperm(vocab_size, device=device)[:64] for _ in range(num_rows)]).int()

    def each(value: float) -> Tensor:
        return torch.full((num_rows,), value, device=device)

    entries = LogitEntries(rows.repeat_interleave(64), tokens.flatten(), torch.zeros(64 * num_rows, device=device))
    penalties = Penalties(rows.long(), each(1.1), each(0.1), each(0.1), counts)

    def plain(scores: Tensor) -> None:
        scores.index_put_((entries.rows.long(), entries.tokens.long()), entries.values, accumulate=True)
        seen = counts > 0
        turned = torch.where(scores > 0, scores / 1.1, scores * 1.1)
        scores.copy_(torch.where(seen, turned, scores) - 0.1 * counts - 0.1 * seen)

    def ours() -> None:
        # Not returned: each call changes the logits again.
        adjust_logits(logits, entries, penalties)

    shape = f"{num_rows} × {vocab_size}, {tokens_seen} seen"
    return KernelCase("adjust_logits", shape, Bound.MEMORY, counts.nbytes, ours, _torch(plain, logits.clone()))


def draw(device: torch.device, num_rows: int, vocab_size: int, temperature: float) -> KernelCase:
    """Samples a token for each row: the argmax at temperature 0, else with top-k, top-p and min-p."""
    from quire_kernels.sample import SamplingTensors, sample

    def rows(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    logits = torch.randn(num_rows, vocab_size, device=device) * 4
    sampling = SamplingTensors(
        temperature=rows(temperature, torch.float32),
        top_k=rows(64, torch.int32),
        top_p=rows(0.9, torch.float64),
        min_p=rows(0.05, torch.float32),
        seeds=rows(1, torch.int64),
        indices=rows(0, torch.int32),
        positions=rows(7, torch.int32),
    )

    def plain(scores: Tensor) -> Tensor | None:
        if temperature == 0:
            return scores.argmax(-1)
        ordered, tokens = (scores / temperature).sort(-1, descending=True)
        chances = ordered.softmax(-1)
        is_dropped = chances.cumsum(-1) - chances > 0.9
        is_dropped |= chances < 0.05 * chances[:, :1]
        is_dropped[:, 64:] = True
        place = torch.multinomial(chances.masked_fill(is_dropped, 0), 1)
        tokens.gather(-1, place)
        return None  # another generator samples other tokens

    kind = "greedy" if temperature == 0 else "top-k, top-p, min-p"
    shape = f"{num_rows} × {vocab_size}, {kind}"
    return KernelCase(
        "sample", shape, Bound.MEMORY, logits.nbytes, lambda: sample(logits, sampling), _torch(plain, logits)
    )


def _torch(plain: Callable[[Tensor], Tensor | None], inputs: Tensor) -> dict[str, Run]:
    compiled: list[Callable[[Tensor], Tensor | None]] = []

    def run() -> object:
        if not compiled:
            compiled.append(torch.compile(plain, dynamic=False))
        return compiled[0](inputs)

    peers: dict[str, Run] = {"torch": lambda: plain(inputs)}
    return peers | {"torch.compile": run} if inputs.is_cuda else peers


def _new_kv(device: torch.device, heads: Heads, num_tokens: int) -> tuple[Tensor, Tensor]:
    shape = (num_tokens, heads.num_kv_heads, heads.head_dim)
    return torch.randn(shape, device=device, dtype=_DTYPE), torch.randn(shape, device=device, dtype=_DTYPE)


def _cache(device: torch.device, heads: Heads, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """One layer's keys and values, and a slot for each token: those of consecutive tokens in scattered blocks."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = (num_blocks, 2, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    cache = torch.zeros(shape, device=device, dtype=_DTYPE)
    blocks = torch.randperm(num_blocks, device=device)
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[:num_tokens]
    return cache[:, 1, 0], cache[:, 1, 1], slots.contiguous()


def _cache_8bit(
    device: torch.device, heads: Heads, num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """As `_cache`, with scales."""
    keys, values, slots = _cache(device, heads, num_tokens)
    scales = (torch.zeros(keys.shape[:3], device=device), torch.zeros(keys.shape[:3], device=device))
    return keys.to(dtype), values.to(dtype), scales, slots


def _frequencies(heads: Heads, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions."""
    pairs = torch.arange(heads.head_dim // 2, device=device, dtype=torch.float32)
    return 1e4 ** -(pairs * 2 / heads.head_dim)


def _stored_bytes_8bit(heads: Heads, num_tokens: int) -> int:
    """Codes and scales of the tokens' keys and values."""
    return 2 * num_tokens * heads.num_kv_heads * (heads.head_dim + 4)


def _kv_shape(heads: Heads, num_tokens: int) -> str:
    return f"{heads.num_kv_heads} heads of {heads.head_dim}, {num_tokens} tokens"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    keys[blocks, :, offsets] = key
    values[blocks, :, offsets] = value
