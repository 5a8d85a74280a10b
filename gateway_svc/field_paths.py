"""The fields that a validation error may name, and how each protocol spells them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Field(StrEnum):
    """Fields of a request, as the contract's Generation names them. Those of sampling that are numbers are in
    `sampling_fields`.
    """

    MODEL = "model"
    PROMPT = "prompt"
    TEXT = "text"
    TOKEN_IDS = "token_ids.ids"
    SUFFIX = "suffix"
    """Over HTTP only."""
    MESSAGES = "chat.messages"
    TOOLS = "chat.tools"
    TOOL_CHOICE = "chat.tool_choice"
    TEMPLATE_VARIABLES = "chat.template_kwargs"
    REASONING_EFFORT = "chat.reasoning_effort"
    MAX_REASONING_TOKENS = "chat.max_reasoning_tokens"
    PROMPT_END = "chat.prompt_end"
    SEED = "sampling.seed"
    LOGIT_BIAS = "sampling.logit_bias"
    ALLOWED_TOKEN_IDS = "sampling.allowed_token_ids"
    BAD_WORDS = "sampling.bad_words"
    MAX_TOKENS = "stopping.max_tokens"
    MIN_TOKENS = "stopping.min_tokens"
    IGNORE_EOS = "stopping.ignore_eos"
    STOP = "stopping.stop"
    STOP_TOKEN_IDS = "stopping.stop_token_ids"
    N = "n"
    BEST_OF = "best_of"
    BEAM_SEARCH = "beam_search"
    BEAM_WIDTH = "beam_search.width"
    LENGTH_PENALTY = "beam_search.length_penalty"
    EARLY_STOPPING = "beam_search.early_stopping"
    LOGPROBS = "logprobs"
    LOGPROB_TOKEN_IDS = "logprob_token_ids"
    PROMPT_LOGPROBS = "prompt_logprobs"
    TRUNCATE_PROMPT_TOKENS = "truncate_prompt_tokens"
    TRUNCATION_SIDE = "truncation_side"
    REQUEST_ID = "request_id"
    PRIORITY = "priority"
    INSTRUCTION = "instruction"
    RETENTION = "retention"
    CACHE_SALT = "cache_salt"
    """Over HTTP only."""
    JSON_SCHEMA = "constraint.json_schema"
    JSON_OBJECT = "constraint.json_object"
    REGEX = "constraint.regex"
    GRAMMAR = "constraint.grammar"
    GBNF = "constraint.gbnf"
    CHOICE = "constraint.choice.choices"
    WHITESPACE_PATTERN = "constraint.whitespace_pattern"
    """Over HTTP only."""


class FieldPath(Protocol):
    """How the client's protocol spells a field, given as the contract's Generation names it, or one item of a repeated
    one.
    """

    def __call__(self, which: str, item_index: int | None = None) -> str: ...


def contract_field_path(which: str, item_index: int | None = None) -> str:
    """A field as the contract's Generation spells it."""
    return str(which) if item_index is None else f"{which}[{item_index}]"


def generation_field_path(which: str, item_index: int | None = None) -> str:
    """A field as spelled in a request that holds a Generation."""
    return f"generation.{contract_field_path(which, item_index)}"


@dataclass(frozen=True, slots=True)
class NamedFields:
    """The field path of a protocol with `names` of its own. Other fields, which its bodies cannot set, keep those of
    the contract."""

    names: Mapping[str, str]
    lone: frozenset[str] = frozenset()
    """Lists that the body has as one value."""

    def __call__(self, which: str, item_index: int | None = None) -> str:
        name = self.names.get(which, str(which))
        return name if item_index is None or which in self.lone else f"{name}[{item_index}]"
