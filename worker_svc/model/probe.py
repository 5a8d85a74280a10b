"""Finds out how a model of transformers attends, and checks that tokens influence each other through attention only.

Three passes over three tokens, in which each token attends to itself only: one whose masks describe themselves, and two
that must agree on a token whose neighbours differ. No architecture is named: a model that does not pass is rejected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from worker_svc.model.attention_interface import PAGED, SINKS, AttentionCall, attention_forward, run
from worker_svc.model.host_waits import first_host_wait
from worker_svc.model_layout import KVShape, LayerAttention, ModelLayout

_DESCRIBED = "quire_described"
# Values of a mask that is no window.
_NO_WINDOW = 0
_OTHER = -1
# Arguments of a layer that do not change its attention, besides mask, scale, window and cap.
_HARMLESS = {"dropout", "is_causal", "position_ids", "logits_to_keep"}
# Equal rows differ by less, relative to their norm, even if products round differently.
_NEAR = {torch.float32: 1e-3}
_NEAR_16_BITS = 5e-2


class IncompatibleModel(Exception):  # noqa: N818
    """Why a model cannot run over a paged cache. The text continues "the model"."""


@dataclass(frozen=True, slots=True)
class FoundAttention:
    """How a model attends."""

    layout: ModelLayout
    places: dict[int, int]
    """The index in the layout of each of the model's own layer numbers."""
    num_heads: tuple[int, ...]
    """Of the queries, of each layer of the layout."""


def _context_length(config: Any) -> int:
    """How many tokens a sequence may have, given the config of a text model.

    If positions change their frequencies beyond the original context, as with LongRoPE, the context ends there: keys in
    the cache would have to change with them.
    """
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise IncompatibleModel("does not state its context length")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    originals = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return int(min([length, *originals]))


def _describe_mask(*, mask_function: Callable[..., Tensor], config: Any, device: torch.device, **_: Any) -> Tensor:
    """A mask function for transformers whose mask [1, 1, 1, 1] encodes the kind of the real mask.

    float64: how many keys up to its own a query sees, or one of the two values above.
    """
    length = _context_length(config.get_text_config())
    first = torch.tensor(0, device=device)
    keys = torch.arange(length, device=device)

    def visible(query: int) -> Tensor:
        """bool [length], of a batch's and a head's first."""
        return mask_function(first, first, torch.tensor(query, device=device), keys).expand(length)

    window = int(visible(length - 1).sum())
    windowed = all(
        torch.equal(visible(query), (keys <= query) & (keys > query - window))
        for query in {0, length // 3, length // 2, length - 1}
    )
    kind = _OTHER if not windowed else window if window < length else _NO_WINDOW
    return torch.full((1, 1, 1, 1), kind, dtype=torch.float64, device=device)


AttentionInterface.register(_DESCRIBED, attention_forward)
AttentionMaskInterface.register(_DESCRIBED, _describe_mask)


class _Recorder:
    """Records the arguments of every layer, and lets each token attend to itself only."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        if call.key.shape != call.value.shape:
            raise IncompatibleModel(f"has keys of {call.key.shape[2]} dimensions and values of {call.value.shape[2]}")
        if call.query.shape[2] != call.key.shape[2] or call.query.shape[1] % call.key.shape[1]:
            raise IncompatibleModel(
                f"has queries of the shape {list(call.query.shape)} and keys of {list(call.key.shape)}"
            )
        self.calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)


def probe(model: Any) -> FoundAttention:
    """Finds out how a model attends, and has it call the paged attention from now on. Raises IncompatibleModel."""
    config = model.config.get_text_config()
    length = _context_length(config)
    model.set_attn_implementation(_DESCRIBED)
    recorded, logits = _run(model, [1, 2, 3], [0, 1, 2])
    # With tokens that are not consecutive, masks would look for packed sequences.
    model.set_attn_implementation(PAGED)
    _check_isolation(model, length)
    if logits.shape[1] != config.vocab_size:
        raise IncompatibleModel(f"has {logits.shape[1]} logits for a vocabulary of {config.vocab_size}")
    shapes = {tuple(call.key.shape[1:]) for call in recorded}
    if len(shapes) > 1:
        raise IncompatibleModel(
            f"has layers of different shapes (KV heads, dimensions): {', '.join(map(str, sorted(shapes)))}"
        )
    ((num_kv_heads, head_dim),) = shapes
    layers = tuple(_layer_attention(call) for call in recorded)
    _check_cache(config, recorded, layers, length)
    places = {call.layer: place for place, call in enumerate(recorded)}
    num_heads = tuple(call.query.shape[1] for call in recorded)
    kv, places_of_kv = (KVShape(num_kv_heads, head_dim),) * len(layers), tuple(range(len(layers)))
    return FoundAttention(ModelLayout(config.vocab_size, length, kv, layers, places_of_kv), places, num_heads)


def find_host_wait(model: Any) -> str | None:
    """What in a step of a model that passed the probe waits for its device, as `first_host_wait` has it."""
    # Copies to the device are not the model's.
    tokens, places = (torch.arange(3, device=model.device) for _ in range(2))
    with torch.inference_mode():
        return first_host_wait(lambda: run(model, tokens, places, tokens, _Recorder()))


def _run(model: Any, token_ids: list[int], positions: list[int]) -> tuple[list[AttentionCall], Tensor]:
    """The arguments of each layer, once each, and the logits of all tokens."""
    recorder = _Recorder()
    tokens, places = (torch.tensor(values, device=model.device) for values in (token_ids, positions))
    try:
        with torch.inference_mode():
            logits = run(model, tokens, places, torch.arange(len(tokens), device=model.device), recorder)
    except IncompatibleModel:
        raise
    except Exception as error:  # any exception of an architecture
        raise IncompatibleModel(f"does not run without a cache of its own: {type(error).__name__}: {error}") from error
    calls = recorder.calls
    if not calls:
        raise IncompatibleModel("does not call the attention interface")
    if len({call.layer for call in calls}) < len(calls):
        raise IncompatibleModel("attends more than once in a layer")
    return calls, logits


def _check_isolation(model: Any, length: int) -> None:
    """A token's result must depend neither on its neighbours nor on its index among them."""
    position = min(2, length - 1)
    last, last_logits = _run(model, [1, 2, 3], [min(5, length - 1), length - 1, position])
    first, first_logits = _run(model, [3, 4, 1], [position, 0, min(3, length - 1)])
    pairs = [(last_logits, first_logits)]
    for one, other in zip(last, first, strict=True):
        pairs += [(one.query, other.query), (one.key, other.key), (one.value, other.value)]
    for one_rows, other_rows in pairs:
        expected, actual = one_rows[2].float(), other_rows[0].float()
        near = _NEAR.get(one_rows.dtype, _NEAR_16_BITS)
        if not (expected - actual).norm() <= near * expected.norm():
            raise IncompatibleModel(
                "lets tokens know of each other, or of their order, by other means than attention and positions: by "
                "states, convolutions, or positions of its own"
            )


def _check_cache(config: Any, calls: list[AttentionCall], layers: tuple[LayerAttention, ...], length: int) -> None:
    """The windows in the masks must be those of transformers' own cache."""
    kept = DynamicCache(config=config).layers
    for call, layer in zip(calls, layers, strict=True):
        window = getattr(kept[call.layer], "sliding_window", None) if call.layer < len(kept) else None
        if (length if window is None else min(window, length)) != (layer.window or length):
            raise IncompatibleModel(
                f"has a layer that keeps {window or 'all'} tokens, and attends to {layer.window or 'all'}"
            )


def _layer_attention(call: AttentionCall) -> LayerAttention:
    options = dict(call.options)
    scale = options.pop("scaling", None)
    soft_cap = options.pop("softcap", None)
    # The mask decides the window.
    options.pop("sliding_window", None)
    sinks = call.sinks
    if sinks is not None and sinks.shape == call.query.shape[1:2]:
        options.pop(SINKS)
    unknown = {name for name, value in options.items() if value is not None and value is not False} - _HARMLESS
    if unknown:
        raise IncompatibleModel(f"uses unsupported attention arguments: {', '.join(sorted(unknown))}")
    if call.mask is None or call.mask.shape != (1, 1, 1, 1):
        raise IncompatibleModel("does not state which tokens a token attends to")
    window = int(call.mask)
    if window == _OTHER:
        raise IncompatibleModel("attends to other tokens than those before, or a window of them")
    if not all(factor is None or factor > 0 for factor in (scale, soft_cap)):
        raise IncompatibleModel(f"scales attention by {scale}, with a cap of {soft_cap}: both must be above 0")
    return LayerAttention(
        scale=call.query.shape[2] ** -0.5 if scale is None else float(scale),
        window=None if window == _NO_WINDOW else window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        has_sinks=sinks is not None,
    )
