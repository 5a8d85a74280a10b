"""Checks of single fields, for the validators."""

from collections.abc import Mapping, Sequence

from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.sampling_fields import SamplingField, Value
from gateway_svc.validated_request import ModelInfo
from svc_common.errors import QuireError, Reason


class FieldChecker:
    """Range checks, whose errors name fields as the client spells them."""

    def __init__(self, field_path: FieldPath) -> None:
        self.field_path = field_path

    def invalid(self, which: str, message: str) -> QuireError:
        """The error to raise about a field."""
        return QuireError(Reason.INVALID_FIELD, message, field=self.field_path(which))

    def unsupported(self, which: str, message: str) -> QuireError:
        """The error to raise about a field that is not served as it stands."""
        return QuireError(Reason.FEATURE_UNSUPPORTED, message, field=self.field_path(which))

    def too_long(self, which: Field, num_tokens: int | None, model: ModelInfo) -> QuireError:
        """The error to raise about a prompt that leaves no room."""
        length = "the prompt is too long" if num_tokens is None else f"the prompt is too long, with {num_tokens} tokens"
        return self.beyond_context(which, length, model)

    def beyond_context(self, which: Field, what: str, model: ModelInfo) -> QuireError:
        """The error to raise about what does not fit the context, which begins with what it is.

        Clients of other projects recognize it by "prompt is too long", which Anthropic's API has, or by "this model's
        maximum context length is", which OpenAI's and vLLM's have, and shorten the chat or choose another model.
        """
        limit = f"this model's maximum context length is {model.context_length} tokens"
        message = f"{what}: {limit}, for prompt and output together"
        return QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field=self.field_path(which))

    def integer(self, which: Field, value: int | None, default: int, least: int, most: int) -> int:
        """The value, from `least` to `most`."""
        if value is None:
            return default
        if not least <= value <= most:
            raise self.invalid(which, f"must be between {least} and {most}")
        return value

    def number(self, which: Field, value: float | None, default: float, least: float, most: float) -> float:
        """The value, from `least` to `most`."""
        if value is None:
            return default
        if not least <= value <= most:  # NaN is in no range
            raise self.invalid(which, f"must be between {least:g} and {most:g}")
        return value

    def sampling(self, field: SamplingField, given: Mapping[str, Value]) -> Value:
        """The value of a sampling parameter, in its range."""
        value = given.get(field.name)
        if value is None:
            return field.default
        if value not in field:
            raise self.invalid(field.path, f"must be {field.range}")
        return value

    def max_tokens(self, value: int | None) -> None:
        """Rejects a length below 1."""
        if value is not None and value < 1:
            raise self.invalid(Field.MAX_TOKENS, "must be at least 1")

    def token_ids(self, which: Field, token_ids: Sequence[int], model: ModelInfo) -> None:
        """Rejects ids outside the vocabulary."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
            return
        item_index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < model.vocab_size)
        message = f"is out of vocabulary: must be between 0 and {model.vocab_size - 1}"
        raise QuireError(Reason.INVALID_FIELD, message, field=self.field_path(which, item_index))

    def tokens_of_text(self, which: Field, token_ids: Sequence[int], model: ModelInfo) -> None:
        """Rejects a text or a chat with a token that the tokenizer has, and the model lacks."""
        if not token_ids or max(token_ids) < model.vocab_size:
            return
        token_id = next(token_id for token_id in token_ids if token_id >= model.vocab_size)
        message = f"has the token {token_id}, which the model lacks: its last one is {model.vocab_size - 1}"
        raise self.invalid(which, message)

    def unicode(self, where: str, text: str) -> None:
        """Rejects half a surrogate pair, which JSON can express and UTF-8 cannot."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise QuireError(Reason.INVALID_FIELD, "is not valid Unicode", field=where) from None
