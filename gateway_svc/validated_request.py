"""A validated request to generate: defaults filled in, values in range, the prompt as tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gateway_svc.field_paths import FieldPath, contract_field_path
from gateway_svc.retention import Retention
from gateway_svc.sampling_fields import Value
from gateway_svc.stop_strings import StopString
from gateway_svc.turn_format import TurnFormat
from quire.inference.v1 import inference_pb2
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2


class SpecialTokens(Enum):
    """Whether the text shows special tokens."""

    HIDDEN = "hidden"
    KEPT = "kept"
    JOINED = "joined"
    """Shown, and consecutive ones without the spaces that the tokenizer puts between them."""

    @classmethod
    def of(cls, *, is_kept: bool, has_spaces: bool = True) -> "SpecialTokens":
        if not is_kept:
            return cls.HIDDEN
        return cls.KEPT if has_spaces else cls.JOINED


class Echo(Enum):
    """Whether the prompt is returned."""

    ABSENT = "absent"
    PRESENT = "present"


class TruncationSide(Enum):
    """Where a prompt that is truncated loses tokens."""

    LEFT = "left"
    RIGHT = "right"


class StopText(Enum):
    """Whether the text includes the stop string that ended it."""

    EXCLUDED = "excluded"
    INCLUDED = "included"


class OnDisconnect(Enum):
    """What happens to a request when its client has left."""

    CANCEL = "cancel"
    DETACH = "detach"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that the scheduler serves."""

    name: str
    context_length: int
    vocab_size: int

    @classmethod
    def from_proto(cls, model: scheduler_pb2.Model) -> "ModelInfo":
        return cls(model.name, model.context_length, model.vocab_size)

    def to_proto(self, aliases: Sequence[str]) -> inference_pb2.Model:
        return inference_pb2.Model(
            name=self.name, context_length=self.context_length, vocab_size=self.vocab_size, aliases=aliases
        )


class SeedOrigin(Enum):
    """Whether the client gave the seed, or the gateway drew it."""

    GIVEN = "given"
    DRAWN = "drawn"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled. `params` has every one of `SAMPLING_FIELDS`, by its name."""

    params: Mapping[str, Value]
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed_origin: SeedOrigin = SeedOrigin.GIVEN


@dataclass(frozen=True, slots=True)
class BeforeDefaults:
    """The values of a request without the operator's defaults."""

    sampling: Sampling
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """When sequences end. `eos_token_ids` is empty where the request ignores end-of-text; these are in
    `ignored_eos_token_ids` then.
    """

    max_tokens: int
    min_tokens: int
    stops: tuple[StopString, ...]
    stop_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    stop_text: StopText
    ignored_eos_token_ids: tuple[int, ...] = ()

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence, ascending."""
        return tuple(sorted({*self.stop_token_ids, *self.eos_token_ids}))

    @property
    def suppressed_token_ids(self) -> tuple[int, ...]:
        """Tokens that are not sampled before `min_tokens`, ascending: also an end-of-text that is ignored, as in
        vLLM.
        """
        return tuple(sorted({*self.ending_token_ids, *self.ignored_eos_token_ids})) if self.min_tokens else ()


class EarlyStopping(Enum):
    """When a beam search ends, once it has as many finished sequences as its width; as in transformers."""

    HEURISTIC = scheduler_pb2.EARLY_STOPPING_HEURISTIC
    AT_WIDTH = scheduler_pb2.EARLY_STOPPING_AT_WIDTH
    NEVER = scheduler_pb2.EARLY_STOPPING_NEVER


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """A search for the most probable sequences, instead of sampling."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping

    def to_proto(self) -> scheduler_pb2.BeamSearch:
        return scheduler_pb2.BeamSearch(
            width=self.width, length_penalty=self.length_penalty, early_stopping=self.early_stopping.value
        )


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request for the scheduler, and how its text is sent.

    The scheduler runs `best_of` sequences, and the best `n` of them are sent.
    """

    request_id: str
    on_disconnect: OnDisconnect
    model: str
    prompt_token_ids: list[int]
    sampling: Sampling
    stopping: Stopping
    n: int
    best_of: int
    beam_search: BeamSearchParams | None
    logprobs: int | None
    priority: int
    special_tokens: SpecialTokens
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    echo: Echo = Echo.ABSENT
    omits_output: bool = False
    """Only the prompt is returned. One token is generated."""
    grammar: str = ""
    """What the output must match, in llguidance's Lark syntax; empty: any text."""
    form_digest: str = ""
    """Of the constraint and the tools as the client wrote them; empty without them."""
    turn: TurnFormat | None = None
    """What the answer to a chat is divided into; None: all output is text."""
    clock_digest: bytes = b""
    """Of a chat that the model's template renders as other tokens at another time: a digest of what the client sent,
    which stands for the prompt and the number of tokens that it leaves to the answer. Else empty."""
    before_defaults: BeforeDefaults | None = None
    """Set where the operator's defaults filled in what was left out."""
    retention: Retention | None = None
    """None: the scheduler's default."""
    cache_salt: str = ""
    """Only requests of the tenant with the same one share cached prefixes."""
    attachment: bytes = field(default=b"", repr=False)
    """Stored with the request, and returned by look-ups."""
    is_background: bool = False
    """It runs to its end without a client."""
    field_path: FieldPath = field(default=contract_field_path, compare=False, repr=False)
    """How its client spells fields, for errors of the scheduler."""

    @property
    def is_best_of(self) -> bool:
        """Whether sequences are ranked by their log-probabilities."""
        return self.best_of > self.n

    @property
    def session_protocol(self) -> int:
        """The oldest session protocol that has all parts of the request. Schedulers of older ones ignore some."""
        later = (
            self.sampling.allowed_token_ids,
            self.sampling.bad_words,
            self.logprob_token_ids,
            self.prompt_logprobs is not None,
            self.grammar,
            self.attachment,
            self.is_background,
        )
        return 3 if any(later) else 1

    def to_proto(self, render_options: scheduler_pb2.RenderOptions) -> scheduler_pb2.Submit:
        """The Submit, without key, tenant, trace context and deadline."""
        submit = scheduler_pb2.Submit(
            prompt_token_ids=self.prompt_token_ids,
            n=self.best_of,
            max_tokens=self.stopping.max_tokens,
            sampling=self._sampling_params(self.sampling),
            stop_token_ids=self.stopping.ending_token_ids,
            has_stop_strings=bool(self.stopping.stops),
            priority=self.priority,
            detachable=self.on_disconnect is OnDisconnect.DETACH,
            is_background=self.is_background,
            beam_search=self.beam_search.to_proto() if self.beam_search else None,
            render_options=render_options,
        )
        if self.prompt_logprobs is not None:
            submit.result.prompt_logprobs.num_top_logprobs = self.prompt_logprobs
        submit.body_digest = self._digest(submit)
        submit.model = self.model
        # Not parts of the digest: a request is the same one, however long its record is kept, and whenever it came.
        submit.attachment = self.attachment
        if self.retention is not None:
            submit.retention.CopyFrom(self.retention.to_proto())
        return submit

    def _sampling_params(self, sampling: Sampling) -> worker_pb2.SamplingParams:
        return worker_pb2.SamplingParams(
            **sampling.params,  # type: ignore[arg-type]  # each of its own type
            seed=sampling.seed,
            logit_bias=sampling.logit_bias,
            suppressed_token_ids=self.stopping.suppressed_token_ids,
            min_tokens=self.stopping.min_tokens,
            logprobs=0 if self.logprobs is None and self.is_best_of else self.logprobs,
            grammar=self.grammar,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=[worker_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
            logprob_token_ids=self.logprob_token_ids,
        )

    def _digest(self, submit: scheduler_pb2.Submit) -> bytes:
        """SHA-256 over the body of the request: without its name, and without a seed that the gateway drew.

        Absent fields count as Quire's own defaults, whatever the operator's are, so that the digest is the same at
        gateways with different defaults. The model's name is the one in render_options, as in protocol 1. The grammar
        and the format of the answer are not a part of it: another version may make others of the same request.
        """
        body = scheduler_pb2.Submit()
        body.CopyFrom(submit)
        body.render_options.request_id = ""
        body.render_options.ClearField("turn")
        if self.before_defaults is not None:
            body.sampling.CopyFrom(self._sampling_params(self.before_defaults.sampling))
            body.max_tokens = self.before_defaults.max_tokens
        if self.sampling.seed_origin is SeedOrigin.DRAWN:
            body.sampling.ClearField("seed")
        body.sampling.grammar = self.form_digest
        body.cache_salt = self.cache_salt.encode()
        if self.clock_digest:
            body.ClearField("prompt_token_ids")
            body.ClearField("max_tokens")
            body.render_options.ClearField("prompt_tail")
            body.attachment = self.clock_digest  # which no body has in its digest
        # The release before does not suppress an end-of-text that is ignored. The field follows from others anyway.
        if self.stopping.ignored_eos_token_ids and self.stopping.min_tokens:
            body.sampling.suppressed_token_ids[:] = self.stopping.ending_token_ids
        return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()
