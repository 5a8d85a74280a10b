"""A request to generate, resolved: every default filled in, every value in range, the prompt as tokens."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gateway_svc.field_paths import FieldPath, contract_field_path
from gateway_svc.stop_strings import StopString
from quire.inference.v1 import inference_pb2
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2


class SpecialTokens(Enum):
    """What the text does with special tokens."""

    HIDDEN = "hidden"
    KEPT = "kept"


class StopText(Enum):
    """What the text does with the stop string that ended it."""

    EXCLUDED = "excluded"
    INCLUDED = "included"


class OnDisconnect(Enum):
    """What becomes of a request whose client is gone."""

    CANCEL = "cancel"
    DETACH = "detach"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the scheduler tells of the model that is served."""

    name: str
    context_length: int
    vocab_size: int

    @classmethod
    def from_proto(cls, model: scheduler_pb2.Model) -> "ModelInfo":
        """From a scheduler's status."""
        return cls(model.name, model.context_length, model.vocab_size)

    def to_proto(self) -> inference_pb2.Model:
        """The model in the public contract."""
        return inference_pb2.Model(name=self.name, context_length=self.context_length, vocab_size=self.vocab_size)


class SeedOrigin(Enum):
    """Who chose a seed."""

    GIVEN = "given"
    DRAWN = "drawn"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; ranges as the contract says, and 0 for a top_k that keeps all."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    seed_origin: SeedOrigin = SeedOrigin.GIVEN


@dataclass(frozen=True, slots=True)
class Stopping:
    """When sequences end. `eos_token_ids` is empty where the request goes on through end-of-text."""

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
    """When a beam search ends, once it holds as many finished sequences as it is wide; as transformers has it."""

    HEURISTIC = scheduler_pb2.EARLY_STOPPING_HEURISTIC
    AT_WIDTH = scheduler_pb2.EARLY_STOPPING_AT_WIDTH
    NEVER = scheduler_pb2.EARLY_STOPPING_NEVER


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Search for the likeliest sequences instead of draws."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping

    def to_proto(self) -> scheduler_pb2.BeamSearch:
        """The search as a scheduler is asked for it."""
        return scheduler_pb2.BeamSearch(
            width=self.width, length_penalty=self.length_penalty, early_stopping=self.early_stopping.value
        )


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """What the gateway asks a scheduler to run, and how it gives the text out.

    `best_of` sequences come of the scheduler, and the best `n` of them go out.
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
    field_path: FieldPath = field(default=contract_field_path, compare=False, repr=False)
    """How its client spells fields, for what the scheduler refuses."""

    @property
    def is_best_of(self) -> bool:
        """Whether sequences are ranked by the log-probabilities of what was drawn."""
        return self.best_of > self.n

    def to_proto(self, render_options: scheduler_pb2.RenderOptions) -> scheduler_pb2.Submit:
        """The request as a scheduler is asked to run it, less who asks, from where and until when."""
        ending = self.stopping.ending_token_ids
        logprobs = 0 if self.logprobs is None and self.is_best_of else self.logprobs
        submit = scheduler_pb2.Submit(
            prompt_token_ids=self.prompt_token_ids,
            n=self.best_of,
            max_tokens=self.stopping.max_tokens,
            sampling=worker_pb2.SamplingParams(
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                min_p=self.sampling.min_p,
                presence_penalty=self.sampling.presence_penalty,
                frequency_penalty=self.sampling.frequency_penalty,
                repetition_penalty=self.sampling.repetition_penalty,
                seed=self.sampling.seed,
                logit_bias=self.sampling.logit_bias,
                suppressed_token_ids=ending if self.stopping.min_tokens else (),
                min_tokens=self.stopping.min_tokens,
                logprobs=logprobs,
            ),
            stop_token_ids=ending,
            has_stop_strings=bool(self.stopping.stops),
            priority=self.priority,
            detachable=self.on_disconnect is OnDisconnect.DETACH,
            beam_search=self.beam_search.to_proto() if self.beam_search else None,
            render_options=render_options,
        )
        submit.body_digest = self._digest(submit)
        return submit

    def _digest(self, submit: scheduler_pb2.Submit) -> bytes:
        """SHA-256 over what the client asked for: not its name for it, and not what was drawn for it."""
        asked = scheduler_pb2.Submit()
        asked.CopyFrom(submit)
        asked.render_options.request_id = ""
        if self.sampling.seed_origin is SeedOrigin.DRAWN:
            asked.sampling.ClearField("seed")
        return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()
