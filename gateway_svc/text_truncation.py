"""How many tokens of texts are kept, for calls for values."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.validated_request import ModelInfo, TruncationSide
from gateway_svc.value_inputs import MAX_TEXT_TOKENS
from svc_common.errors import QuireError, Reason

MAX_CONTEXTS = 16
"""A text of more contexts is not tokenized."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a prompt are kept at most; None: a longer one is refused."""

    num_kept: int | None
    side: TruncationSide

    @classmethod
    def of(
        cls, num_kept: int | None, side: TruncationSide, least: int, model: ModelInfo, check: FieldChecker
    ) -> "Truncation":
        """From the fields of a call; -1 is the model's context. Raises QuireError for fewer tokens than `least`."""
        most = model.context_length
        if num_kept == -1:
            num_kept = most
        if num_kept is not None and not least <= num_kept <= most:
            raise check.invalid(Field.TRUNCATE_PROMPT_TOKENS, f"must be -1, or between {least} and {most}")
        return cls(num_kept, side)


def check_text_limit(max_text_tokens: int | None, num_special: int, model: ModelInfo, check: FieldChecker) -> None:
    """Raises QuireError for a limit of one text that the context does not have beside so many special tokens."""
    most = model.context_length - num_special
    if max_text_tokens is not None and not 1 <= max_text_tokens <= most:
        raise check.invalid(MAX_TEXT_TOKENS, f"must be between 1 and {most}")


def check_text(text: str, tokenizer: ModelTokenizer, model: ModelInfo, check: FieldChecker) -> None:
    """Raises QuireError for a text that is empty, is not Unicode, or is too long to be tokenized."""
    if not text:
        raise check.invalid(Field.TEXT, "must not be empty")
    check.unicode(check.field_path(Field.TEXT), text)
    # Beyond the context some texts are tokenized that have few tokens: some tokenizers drop white space, or make one
    # token of a long word. Others are truncated.
    if not tokenizer.may_have(text, MAX_CONTEXTS * model.context_length):
        message = f"is longer than {MAX_CONTEXTS} contexts of {model.context_length} tokens"
        raise QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field=check.field_path(Field.TEXT))


def check_num_tokens(token_ids: Sequence[int], where: Field, model: ModelInfo, check: FieldChecker) -> None:
    """Raises QuireError for an input of no tokens, or of more than the context has."""
    if not token_ids:
        raise check.invalid(where, "must have at least one token")
    if len(token_ids) > model.context_length:
        raise beyond_context(where, f"{len(token_ids)} tokens", model, check)


def beyond_context(where: Field, tokens: str, model: ModelInfo, check: FieldChecker) -> QuireError:
    """The error to raise about an input with so many tokens, if the context is shorter."""
    kept_by = check.field_path(Field.TRUNCATE_PROMPT_TOKENS)
    # The form of vLLM, which clients of other projects recognize.
    limit = f"this model's maximum context length is {model.context_length} tokens"
    message = f"has {tokens}, and {limit}: {kept_by} keeps a part"
    return QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field=check.field_path(where))
