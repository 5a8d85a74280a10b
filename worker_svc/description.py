"""What a replica is and how much it can hold. Plain values, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from worker_svc.errors import StartupFailed
from worker_svc.step import DECODER_RESULTS, PromptComputation

# Logits of a token are up to 1 MB. Fewer rows make the passes over a prompt slow.
_LEAST_SCORED, _MOST_SCORED = 64, 256
# Warm-up steps have a prompt, a sampled token and one after it, as QUIRE_MAX_MODEL_LEN allows. Lengths are int32.
_LEAST_CONTEXT, _MOST_CONTEXT = 3, 2**31 - 1


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a step."""

    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_sequences: int
    num_host_blocks: int = 0
    max_draft_tokens: int = 0
    """For one sequence; 0: nothing is drafted."""
    max_indivisible_tokens: int = 0
    """Of a prompt that is computed in a step of its own, if that is more than `max_step_tokens`."""
    usual_step_tokens: int = 0
    """Of a step: half of them while as many sequences decode as wait for their prompts. 0: `max_step_tokens`."""

    @property
    def max_sampled_rows(self) -> int:
        """The maximum of sampled rows in a step: one for each sequence and one for each draft token."""
        return max(self.max_sequences, min(self.max_step_tokens, self.max_sequences * (1 + self.max_draft_tokens)))

    @property
    def max_scored_rows(self) -> int:
        """How many tokens of a prompt have their logits in memory at the same time."""
        return min(self.max_step_tokens, max(_LEAST_SCORED, min(self.max_sampled_rows, _MOST_SCORED)))


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The model of a replica, its cache, and its speed at start-up.

    Rates are per second: bytes of swapped blocks (0 without host blocks), and computed prompt tokens.
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
    results: Mapping[str, PromptComputation] = field(default_factory=DECODER_RESULTS.copy)
    """The kinds of results that it computes, by name, and how it computes prompts for them."""


def check_context_length(of_model: int) -> None:
    """Raises StartupFailed unless sequences of the context length of the model's files can be computed."""
    if not _LEAST_CONTEXT <= of_model <= _MOST_CONTEXT:
        raise StartupFailed(
            f"the context length of the model is {of_model} tokens, by max_position_embeddings or what its config.json "
            f"has in the place of it: it must be between {_LEAST_CONTEXT} and {_MOST_CONTEXT}"
        )


def context_length_of(max_model_len: int | None, of_model: int) -> int:
    """How many tokens a sequence may have. Raises StartupFailed if that exceeds the model's context length, or the
    latter is no length.
    """
    if max_model_len is None:
        check_context_length(of_model)
        return of_model
    if max_model_len > of_model:
        raise StartupFailed(
            f"QUIRE_MAX_MODEL_LEN is {max_model_len}, but the context length of the model is {of_model} tokens"
        )
    return max_model_len
