"""Prompts of a call whose results are values: read as bodies of the HTTP API, then run by the engine."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from gateway_svc.classifications import UnvalidatedClassifications
from gateway_svc.client_call import Call
from gateway_svc.embeddings import UnvalidatedEmbeddings
from gateway_svc.http_api.body_model import BodyModel
from gateway_svc.http_api.classifying.models import ClassifyBody
from gateway_svc.http_api.classifying.routes import read_classify
from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.embeddings.routes import read_embeddings
from gateway_svc.http_api.scoring.models import ScoreBody
from gateway_svc.http_api.scoring.requests import read_score
from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.request_manager import RequestManager
from gateway_svc.scores import UnvalidatedScores, ValidatedScores
from gateway_svc.tenant import DEFAULT_TENANT
from gateway_svc.tracing import Operation
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.value_inputs import Vector
from quire_offline.engine_request import OnStart
from quire_offline.offline_request import Prompt, given_prompt
from quire_offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire_offline.pooling_params import PoolingParams
from svc_common.errors import QuireError

Text: TypeAlias = str | Mapping[str, Any]
"""A text, or an object with `text`."""

Texts: TypeAlias = Text | Sequence[Text]
"""One or several."""

MAX_PAIRS = 128
"""Pairs that are one EngineRequest. Of equal texts among them one is computed."""

B = TypeVar("B", bound=BodyModel)

_TEXT_OF_LIST = re.compile(r"(text_[12])\[(\d+)\](.*)")


@dataclass(slots=True, eq=False)
class OfflineValues(ABC):
    """An EngineRequest for the values of some prompts."""

    request_id: str
    was_aborted: bool = False
    is_done: bool = False
    _validated: Sequence[ValidatedValue] = ()
    _vectors: Sequence[Vector] = ()

    @property
    @abstractmethod
    def num_prompts(self) -> int: ...

    @property
    def max_tokens(self) -> float:
        return 0

    @property
    @abstractmethod
    def has_numbered_fields(self) -> bool: ...

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.prompt_token_ids) for one in self._validated)

    @property
    def num_tokens(self) -> int:
        return 0

    @abstractmethod
    async def validate(self, manager: RequestManager, model: CatalogModel) -> None: ...

    async def compute(self, manager: RequestManager, on_start: OnStart, on_progress: Callable[[], None]) -> None:
        async with manager.run_values(self._call, self._validated) as group:
            on_start(group)
            self._vectors = await group.values()

    @property
    @abstractmethod
    def _call(self) -> Call: ...


class OfflineInput(OfflineValues):
    """An EngineRequest for the value of one prompt."""

    __slots__ = ()

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def has_numbered_fields(self) -> bool:
        return False

    def _value(self) -> tuple[list[float], list[int]]:
        """The value, once it is done, and the tokens of its prompt."""
        (value,), (validated,) = self._vectors, self._validated
        return value.tolist(), validated.prompt_token_ids


def _input_values(prompt: Prompt, params: PoolingParams, priority: int | None) -> dict[str, Any]:
    """The fields of a body with one input."""
    return {**params.values, "input": given_prompt(prompt), "priority": priority}


@dataclass(slots=True, eq=False, kw_only=True)
class OfflineEmbedding(OfflineInput):
    """One prompt, and its vector."""

    unvalidated: UnvalidatedEmbeddings

    @classmethod
    def of_prompt(
        cls, request_id: str, prompt: Prompt, params: PoolingParams, priority: int | None = None
    ) -> "OfflineEmbedding":
        """A prompt to embed. Raises QuireError, which names a field as PoolingParams does, or `input`."""
        body = _read(EmbeddingsBody, _input_values(prompt, params, priority))
        return cls(request_id, unvalidated=read_embeddings(body).inputs.unvalidated)

    async def validate(self, manager: RequestManager, model: CatalogModel) -> None:
        self._validated = await manager.validate_embeddings(self._call, model, self.unvalidated, self.request_id)

    def output(self) -> EmbeddingRequestOutput:
        """The vector, once it is done."""
        vector, token_ids = self._value()
        return EmbeddingRequestOutput(self.request_id, EmbeddingOutput(vector), token_ids)

    @property
    def _call(self) -> Call:
        return Call(DEFAULT_TENANT, Operation.EMBEDDINGS)


@dataclass(slots=True, eq=False, kw_only=True)
class OfflineClassification(OfflineInput):
    """One prompt, and its numbers."""

    unvalidated: UnvalidatedClassifications

    @classmethod
    def of_prompt(
        cls, request_id: str, prompt: Prompt, params: PoolingParams, priority: int | None = None
    ) -> "OfflineClassification":
        """A prompt to classify. Raises QuireError, which names a field as PoolingParams does, or `input`."""
        body = _read(ClassifyBody, _input_values(prompt, params, priority))
        return cls(request_id, unvalidated=read_classify(body).unvalidated)

    async def validate(self, manager: RequestManager, model: CatalogModel) -> None:
        self._validated = await manager.validate_classifications(self._call, model, self.unvalidated, self.request_id)

    def output(self) -> ClassificationRequestOutput:
        """The numbers, once it is done."""
        numbers, token_ids = self._value()
        return ClassificationRequestOutput(self.request_id, ClassificationOutput(numbers), token_ids)

    @property
    def _call(self) -> Call:
        return Call(DEFAULT_TENANT, Operation.CLASSIFY)


@dataclass(slots=True, eq=False, kw_only=True)
class OfflineScores(OfflineValues):
    """Some pairs of a call, and their scores."""

    unvalidated: UnvalidatedScores
    first: int
    """Which pair of its call its first one is."""
    _scores: ValidatedScores | None = None

    @classmethod
    def of_texts(
        cls,
        request_id: str,
        texts: "TextPairs",
        params: PoolingParams,
        priority: int | None = None,
        instruction: str | None = None,
    ) -> "OfflineScores":
        """Pairs to compare. Raises QuireError, which names a field as PoolingParams does, or `text_1` or `text_2`."""
        given = {"text_1": texts.text_1, "text_2": texts.text_2, "priority": priority, "instruction": instruction}
        values = {**params.values, **given}
        with _numbered_from(texts.first):
            return cls(request_id, unvalidated=read_score(_read(ScoreBody, values)), first=texts.first)

    @property
    def num_prompts(self) -> int:
        return len(self.unvalidated.pairs.pairs)

    @property
    def has_numbered_fields(self) -> bool:
        return True

    async def validate(self, manager: RequestManager, model: CatalogModel) -> None:
        with _numbered_from(self.first):
            self._scores = await manager.validate_scores(self._call, model, self.unvalidated, self.request_id)
        self._validated = self._scores.requests

    def outputs(self) -> list[ScoringRequestOutput]:
        """The scores, once it is done."""
        assert self._scores is not None, "it is done"
        scores = self._scores.read(self._vectors)
        return [
            ScoringRequestOutput(
                f"{self.request_id}-{self.first + number}",
                ScoringOutput(score),
                [token_id for place in places for token_id in self._validated[place].prompt_token_ids],
            )
            for number, (places, score) in enumerate(zip(self._scores.places, scores, strict=True))
        ]

    @property
    def _call(self) -> Call:
        return Call(DEFAULT_TENANT, Operation.SCORE)


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Some pairs of a call, as a body of /score has them. `first` is the number of the first one in the call."""

    first: int
    text_1: Any
    text_2: Any

    @classmethod
    def split(cls, text_1: Texts, text_2: Texts) -> "list[TextPairs]":
        """All pairs of a call: one text with each of the others, or each with the other one at its place.

        Lists whose lengths do not fit are one item, which the validator of bodies refuses.
        """
        one, other = _plain(text_1), _plain(text_2)
        if not isinstance(other, list) or (isinstance(one, list) and len(one) not in (1, len(other))):
            return [cls(0, one, other)]
        is_list = isinstance(one, list) and len(one) > 1
        return [
            cls(first, one[first : first + MAX_PAIRS] if is_list else one, other[first : first + MAX_PAIRS])
            for first in range(0, max(1, len(other)), MAX_PAIRS)
        ]


def _read(kind: type[B], values: Mapping[str, Any]) -> B:
    """A body of these values. Raises QuireError, also for a field that it does not have."""
    UndefinedFields.REFUSE.check(kind, values)
    return kind.of(values)


@contextmanager
def _numbered_from(first: int) -> Iterator[None]:
    """Counts the texts of fields of errors within from the first one of the call."""
    try:
        yield
    except QuireError as error:
        match = _TEXT_OF_LIST.fullmatch(error.field or "")
        if match is None or first == 0:
            raise
        name, index, rest = match.groups()
        raise QuireError(error.reason, error.message, field=f"{name}[{first + int(index)}]{rest}") from None


def _plain(texts: Texts) -> Any:
    """Texts as JSON has them."""
    if isinstance(texts, Mapping):
        return dict(texts)
    return [_plain(one) for one in texts] if isinstance(texts, tuple | list) else texts
