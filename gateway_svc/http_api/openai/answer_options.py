"""What an answer of OpenAI's API has if the client asks for it."""

from dataclasses import dataclass
from typing import Any, Protocol

from gateway_svc.rendering import Rendering
from gateway_svc.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer has that a client asks for, as in vLLM. `has_token_ids`: the ids of prompt and output.
    `names_tokens_by_id`: log-probabilities have token_id:N instead of a token's text; None: the request leaves it
    open. `has_running_usage`: each event
    of a stream has the usage so far. `service_tier` is in the answer if it was in the request. `hides_reasoning`:
    reasoning is generated, and left out.
    """

    has_token_ids: bool = False
    names_tokens_by_id: bool | None = None
    has_running_usage: bool = False
    service_tier: str | None = None
    hides_reasoning: bool = False

    def token_texts(self, vocabulary: Vocabulary) -> "TokenTexts":
        """The texts of tokens in log-probabilities."""
        return _TokensById(vocabulary) if self.names_tokens_by_id else vocabulary


NO_OPTIONS = AnswerOptions()


class TokenTexts(Protocol):
    """Texts of tokens, for log-probabilities."""

    def token_text(self, token_id: int) -> str:
        """A single token as text."""
        ...

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token."""
        ...


class _TokensById:
    """vLLM's texts, which distinguish tokens without a text of their own."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.piece = vocabulary.piece

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


def running_usage(rendering: Rendering, num_tokens: int) -> dict[str, Any]:
    """The usage of one choice after so many tokens."""
    return {
        "prompt_tokens": rendering.prompt_length,
        "completion_tokens": num_tokens,
        "total_tokens": rendering.prompt_length + num_tokens,
    }
