"""What a replica is and what it can hold. Plain values, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a step may ask for."""

    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_sequences: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The model that a replica serves, the cache that it has for it, and how fast it was at start.

    Rates are per second: bytes of blocks swapped, 0 where there are no host blocks; and tokens of a prompt computed.
    """

    model: str
    fingerprint: bytes
    tokenizer_fingerprint: bytes
    block_bytes: int
    limits: WorkerLimits
    dtype: str
    device: str
    swap_bytes_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0
