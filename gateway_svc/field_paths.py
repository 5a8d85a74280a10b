"""The fields that a request may be wrong in, and how either protocol spells them."""

from enum import StrEnum
from typing import Protocol


class Field(StrEnum):
    """Fields of a request, as the contract's Generation names them."""

    MODEL = "model"
    PROMPT = "prompt"
    TEXT = "text"
    TOKEN_IDS = "token_ids.ids"
    MESSAGES = "chat.messages"
    TEMPERATURE = "sampling.temperature"
    TOP_P = "sampling.top_p"
    TOP_K = "sampling.top_k"
    MIN_P = "sampling.min_p"
    PRESENCE_PENALTY = "sampling.presence_penalty"
    FREQUENCY_PENALTY = "sampling.frequency_penalty"
    REPETITION_PENALTY = "sampling.repetition_penalty"
    SEED = "sampling.seed"
    LOGIT_BIAS = "sampling.logit_bias"
    MAX_TOKENS = "stopping.max_tokens"
    MIN_TOKENS = "stopping.min_tokens"
    STOP = "stopping.stop"
    STOP_TOKEN_IDS = "stopping.stop_token_ids"
    N = "n"
    BEST_OF = "best_of"
    BEAM_SEARCH = "beam_search"
    BEAM_WIDTH = "beam_search.width"
    LENGTH_PENALTY = "beam_search.length_penalty"
    EARLY_STOPPING = "beam_search.early_stopping"
    LOGPROBS = "logprobs"
    REQUEST_ID = "request_id"
    PRIORITY = "priority"


class FieldPath(Protocol):
    """How the client's protocol spells a field, or one place of a repeated one."""

    def __call__(self, which: Field, item_index: int | None = None) -> str: ...


def contract_field_path(which: Field, item_index: int | None = None) -> str:
    """A field as the contract's Generation spells it."""
    return str(which) if item_index is None else f"{which}[{item_index}]"
