"""What a replica is and what it can hold. Plain values, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may ask for."""

    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class Identity:
    """The model that a replica serves, and the cache that it has for it."""

    model: str
    fingerprint: bytes
    tokenizer_fingerprint: bytes
    block_bytes: int
    limits: Limits
    dtype: str
    device: str
