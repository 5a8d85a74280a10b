"""What the rest of a worker needs to know of a model: its sizes, and how each layer attends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends.

    Scores are multiplied by `scale`, then capped: s becomes c * tanh(s / c) for a `soft_cap` c. With a `window` w a
    query sees the last w keys up to its own. None: no cap, all keys. If `bidirectional`, it sees as many after its own.
    With sinks, the call brings one more score for each head, of a key without a value (arXiv:2309.17453).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    bidirectional: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values of one layer of the cache."""

    num_heads: int
    head_dim: int
    """Dimensions of a key and of a value."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Sizes of a model."""

    vocab_size: int
    context_length: int
    kv: tuple[KVShape, ...]
    """The layers of the cache."""
    layers: tuple[LayerAttention, ...]
    """How each layer with attention attends."""
    kv_of_layers: tuple[int, ...]
    """For each of these, the layer of the cache that it reads."""
    keys_hold_values: bool = False
    """Values are the keys themselves, and the cache holds them once: latent vectors, as of DeepSeek-V2."""

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The dimensions of heads, each number once."""
        return tuple(dict.fromkeys(shape.head_dim for shape in self.kv))
