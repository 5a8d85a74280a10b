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
    seed_origin: SeedOrigin = SeedOrigin.GIVEN


@dataclass(frozen=True, slots=True)
class BeforeDefaults:
    """The values of a request without the operator's defaults."""

    sampling: Sampling
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """When sequences end. `eos_token_ids` is empty where the request ignores end-of-text."""

    max_tokens: int
    min_tokens: int
    stops: tuple[StopString, ...]
    stop_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    stop_text: StopText

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence, ascending."""
        return tuple(sorted({*self.stop_token_ids, *self.eos_token_ids}))


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
    grammar: str = ""
    """What the output must match, in llguidance's Lark syntax; empty: any text."""
    form_digest: str = ""
    """Of the constraint and the tools as the client wrote them; empty without them."""
    turn: TurnFormat | None = None
    """What the answer to a chat is divided into; None: all output is text."""
    before_defaults: BeforeDefaults | None = None
    """Set where the operator's defaults filled in what was left out."""
    retention: Retention | None = None
    """None: the scheduler's default."""
    field_path: FieldPath = field(default=contract_field_path, compare=False, repr=False)
    """How its client spells fields, for errors of the scheduler."""

    @property
    def is_best_of(self) -> bool:
        """Whether sequences are ranked by their log-probabilities."""
        return self.best_of > self.n

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
            beam_search=self.beam_search.to_proto() if self.beam_search else None,
            render_options=render_options,
        )
        submit.body_digest = self._digest(submit)
        submit.model = self.model
        # Not a part of the digest: a request is the same one, however long its record is kept.
        if self.retention is not None:
            submit.retention.CopyFrom(self.retention.to_proto())
        return submit

    def _sampling_params(self, sampling: Sampling) -> worker_pb2.SamplingParams:
        return worker_pb2.SamplingParams(
            **sampling.params,  # type: ignore[arg-type]  # each of its own type
            seed=sampling.seed,
            logit_bias=sampling.logit_bias,
            suppressed_token_ids=self.stopping.ending_token_ids if self.stopping.min_tokens else (),
            min_tokens=self.stopping.min_tokens,
            logprobs=0 if self.logprobs is None and self.is_best_of else self.logprobs,
            grammar=self.grammar,
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
        return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()
