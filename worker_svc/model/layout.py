"""What the rest of a worker must know of a model: what it reads and writes, and what its cache holds."""

from dataclasses import dataclass

from worker_svc.attention import LayerAttention


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Sizes of a model. Every layer that attends has as many KV heads, of as many dimensions."""

    vocab_size: int
    context_length: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerAttention, ...]
    """How each layer attends, in the order of the cache's layers."""
