"""How the tokens of a request become text: all that a gateway needs to continue a request of any gateway."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from gateway_svc.stop_strings import StopString
from gateway_svc.turn_format import TurnFormat
from gateway_svc.validated_request import Echo, OnDisconnect, SpecialTokens, StopText, ValidatedRequest
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2

_BYTES_OF_A_CHARACTER = 4
_CHUNK_BYTES = 2 * 2**20
"""Of a chunk in the public contract. Without a setting, gRPC's clients take messages of 4 MiB."""
_ID_BYTES, _LOGPROB_BYTES = 5, 32  # in it of a token, and of a log-probability without its text


@dataclass(frozen=True, slots=True)
class Rendering:
    """The scheduler runs `num_sequences`, and the best `n` of them are sent.

    `prompt_tail` holds the last tokens of the prompt that are text, as many as a character has bytes. `logprobs` is how
    many top tokens are sent with each token, or None.
    """

    request_id: str
    model: str
    on_disconnect: OnDisconnect
    stops: tuple[StopString, ...]
    stop_text: StopText
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    special_tokens: SpecialTokens
    prompt_tail: tuple[int, ...]
    prompt_length: int
    n: int
    num_sequences: int
    logprobs: int | None
    seed: int
    logprob_token_ids: tuple[int, ...] = ()
    echo: Echo = Echo.ABSENT
    prompt_logprobs: int | None = None
    prompt_token_ids: tuple[int, ...] = ()
    """The whole prompt, if it is returned."""
    omits_output: bool = False
    """Whether only the prompt is returned."""
    turn: TurnFormat | None = None
    """None: all output is text."""
    tokenizer_fingerprint: bytes = b""
    """Of the tokenizer that made the prompt's tokens; empty for a request of this gateway, or of protocol 1."""

    @classmethod
    def of(cls, generation: ValidatedRequest, vocabulary: Vocabulary) -> "Rendering":
        """The rendering of a request of this gateway."""
        stopping = generation.stopping
        hidden = vocabulary.hidden_ids(generation.special_tokens)
        returns_prompt = generation.echo is Echo.PRESENT or generation.prompt_logprobs is not None
        return cls(
            request_id=generation.request_id,
            model=generation.model,
            on_disconnect=generation.on_disconnect,
            stops=stopping.stops,
            stop_text=stopping.stop_text,
            min_tokens=stopping.min_tokens,
            stop_token_ids=stopping.stop_token_ids,
            special_tokens=generation.special_tokens,
            prompt_tail=_visible_tail(generation.prompt_token_ids, hidden),
            prompt_length=len(generation.prompt_token_ids),
            n=generation.n,
            num_sequences=generation.best_of,
            logprobs=generation.logprobs,
            seed=generation.sampling.seed,
            logprob_token_ids=generation.logprob_token_ids,
            echo=generation.echo,
            prompt_logprobs=generation.prompt_logprobs,
            prompt_token_ids=tuple(generation.prompt_token_ids) if returns_prompt else (),
            omits_output=generation.omits_output,
            turn=generation.turn,
        )

    @classmethod
    def from_proto(cls, attached: scheduler_pb2.Attached) -> "Rendering":
        """The rendering of a request of any gateway, as the scheduler stored it. Raises QuireError."""
        options = attached.render_options
        return cls(
            request_id=options.request_id,
            model=options.model,
            on_disconnect=OnDisconnect.DETACH if attached.detachable else OnDisconnect.CANCEL,
            stops=tuple(map(StopString.compile, options.stops)),
            stop_text=StopText.INCLUDED if options.include_stop else StopText.EXCLUDED,
            min_tokens=options.min_tokens,
            stop_token_ids=tuple(options.stop_token_ids),
            special_tokens=SpecialTokens.of(
                is_kept=options.keep_special_tokens, has_spaces=not options.joins_special_tokens
            ),
            prompt_tail=tuple(options.prompt_tail),
            prompt_length=attached.prompt_length,
            n=options.n,
            num_sequences=attached.num_sequences,
            logprobs=options.logprobs if options.HasField("logprobs") else None,
            seed=attached.seed,
            logprob_token_ids=tuple(options.logprob_token_ids),
            echo=Echo.PRESENT if options.echo else Echo.ABSENT,
            prompt_logprobs=options.prompt_logprobs if options.HasField("prompt_logprobs") else None,
            prompt_token_ids=tuple(attached.prompt_token_ids),
            omits_output=options.omits_output,
            turn=TurnFormat.from_proto(options.turn) if options.HasField("turn") else None,
            tokenizer_fingerprint=attached.tokenizer_fingerprint,
        )

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is divided from the text."""
        return self.turn is not None and self.turn.format.reasoning is not None

    @property
    def num_prompt_logprobs(self) -> int:
        """How many tokens of the prompt have log-probabilities."""
        return 0 if self.prompt_logprobs is None else self.prompt_length - 1

    @property
    def has_logprobs(self) -> bool:
        """Whether its tokens have log-probabilities, for the client or to rank sequences."""
        return self.logprobs is not None or self.is_best_of

    def num_logprobs(self, num_tokens: int) -> int:
        """How many log-probabilities an answer with `num_tokens` tokens of output has, those of the prompt included."""
        of_prompt = 0 if self.prompt_logprobs is None else self.num_prompt_logprobs * (1 + self.prompt_logprobs)
        of_output = 0 if self.logprobs is None else num_tokens * (1 + self.logprobs + len(self.logprob_token_ids))
        return of_prompt + of_output

    def max_chunk_tokens(self, vocabulary: Vocabulary) -> int:
        """How many tokens a chunk may have, so that it fits a message of gRPC with the texts of all log-probabilities,
        however long they are."""
        text_bytes = _BYTES_OF_A_CHARACTER * vocabulary.longest_token
        # A log-probability has the token's text, and its bytes.
        num_logprobs = self.num_logprobs(1) - self.num_logprobs(0)
        token_bytes = _ID_BYTES + text_bytes + num_logprobs * (_LOGPROB_BYTES + 2 * text_bytes)
        return max(1, _CHUNK_BYTES // token_bytes)

    @property
    def is_best_of(self) -> bool:
        """Whether sequences are ranked by their log-probabilities, and so are sent when all have ended."""
        return self.num_sequences > self.n

    def to_proto(self) -> scheduler_pb2.RenderOptions:
        """The fields that the scheduler stores; the others are in the Submit."""
        return scheduler_pb2.RenderOptions(
            request_id=self.request_id,
            model=self.model,
            stops=[stop.text for stop in self.stops],
            include_stop=self.stop_text is StopText.INCLUDED,
            keep_special_tokens=self.special_tokens is not SpecialTokens.HIDDEN,
            joins_special_tokens=self.special_tokens is SpecialTokens.JOINED,
            logprob_token_ids=self.logprob_token_ids,
            echo=self.echo is Echo.PRESENT,
            prompt_logprobs=self.prompt_logprobs,
            omits_output=self.omits_output,
            n=self.n,
            logprobs=self.logprobs,
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            prompt_tail=self.prompt_tail,
            turn=None if self.turn is None else self.turn.to_proto(),
        )


def _visible_tail(token_ids: Sequence[int], hidden_ids: frozenset[int]) -> tuple[int, ...]:
    # Each visible token has at least one byte, and only the last character may be incomplete.
    visible = (token_id for token_id in reversed(token_ids) if token_id not in hidden_ids)
    return tuple(islice(visible, _BYTES_OF_A_CHARACTER))[::-1]
