"""What the handlers of every protocol share: the caller, its body, its requests, and the stream of their answers."""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway_svc.auth import CREDENTIAL_HEADERS, Authenticator
from gateway_svc.call_limits import CallLimits, OpenCall
from gateway_svc.chats import ChatPrompt
from gateway_svc.classifications import UnvalidatedClassifications
from gateway_svc.client_call import Call
from gateway_svc.common_fields import is_request_id
from gateway_svc.embeddings import UnvalidatedEmbeddings
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.http_api.answer_sender import AnswerSender
from gateway_svc.http_api.body_model import BodyModel
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import parse_body
from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.output import Usage
from gateway_svc.request_group import ClientDisconnected, RequestGroup
from gateway_svc.request_manager import RequestManager
from gateway_svc.resume_position import ResumePosition
from gateway_svc.scores import UnvalidatedScores, ValidatedScores
from gateway_svc.tenant import Tenant
from gateway_svc.tenant_shares import Share
from gateway_svc.tenant_threads import TenantThreads
from gateway_svc.tokenizer import PromptTooLong
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import TextPrompt, UnvalidatedRequest
from gateway_svc.validated_request import ModelInfo, ValidatedRequest
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.validation import prompt_field
from gateway_svc.value_inputs import Vector
from gateway_svc.work_costs import BODY_BYTE, CONVERSATION_ITEM
from svc_common.errors import QuireError, Reason

B = TypeVar("B", bound=BodyModel)
T = TypeVar("T")

_MAX_TIMEOUT_SECONDS = 86_400.0
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_MAX_CONTEXTS = 16  # of a text that is tokenized


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a body. `field_path` names fields as the body spells them."""

    unvalidated: UnvalidatedRequest
    field_path: FieldPath

    @property
    def whole_text(self) -> str | None:
        """The text of which all tokens are kept; None: there is none, or it may be truncated."""
        prompt = self.unvalidated.prompt
        is_truncated = self.unvalidated.truncate_prompt_tokens is not None
        return prompt.text if isinstance(prompt, TextPrompt) and not is_truncated else None


@dataclass(frozen=True, slots=True)
class InputValues:
    """The values of a call's prompts, in their order, such as the vectors of its inputs."""

    values: Sequence[Vector]
    model: str
    usage: Usage

    @property
    def num_numbers(self) -> int:
        """How many numbers the values have."""
        return sum(map(len, self.values))


@dataclass(frozen=True, slots=True)
class ClassifiedInputs(InputValues):
    """The numbers of a call's inputs, in their order: one for each label."""

    labels: Sequence[str]


@dataclass(frozen=True, slots=True)
class ScoredPairs(InputValues):
    """The values of a call's prompts, from which `scores` computes the scores of its pairs, in their order."""

    validated: ValidatedScores

    @property
    def num_numbers(self) -> int:
        """How many numbers `scores` takes: many more than the values have, where many pairs have the same texts."""
        return self.validated.num_numbers(self.values)

    def scores(self) -> list[float]:
        """Takes about 0.05 ms for a thousand numbers."""
        return self.validated.read(self.values)


def prompt_usage(usage: Usage) -> dict[str, int]:
    """The usage of a call that generates nothing, as OpenAI has it."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


class HttpCalls:
    """Calls of the HTTP API, whichever protocol they come in."""

    def __init__(
        self,
        request_manager: RequestManager,
        authenticator: Authenticator,
        undefined_fields: UndefinedFields,
        threads: TenantThreads,
        limits: CallLimits,
    ) -> None:
        """`threads` are for work that would delay the streams of others."""
        self.answers = AnswerSender(threads)
        self._request_manager = request_manager
        self._authenticator = authenticator
        self._undefined_fields = undefined_fields
        self._threads = threads
        self._limits = limits

    def tenant(self, exchange: HttpExchange, *, cancels: bool = False) -> Tenant:
        """The tenant of the request's credential, whose calls count from here on. One that `cancels` others may have a
        spare place. Raises QuireError."""
        return self._begin(exchange, cancels=cancels)[0]

    def login(self, exchange: HttpExchange) -> Tenant:
        """The tenant of a credential of what is not a call yet. Raises QuireError."""
        values = ((name, exchange.header(name)) for name in CREDENTIAL_HEADERS)
        credentials = [(name, value) for name, value in values if value is not None]
        return self._authenticator.login(credentials, "http", exchange.peer)

    async def run_if_long(self, tenant: Tenant, cost: float, work: Callable[[], T]) -> T:
        """Does work that takes about `cost` microseconds; if that is long, in a thread that tenants share."""
        return await self._threads.run_if_long(tenant.name, cost, work)

    def call(self, exchange: HttpExchange, operation: Operation) -> Call:
        """The call, with its tenant and deadline. Raises QuireError."""
        tenant, open_call = self._begin(exchange)
        return Call(tenant, operation, _deadline(exchange), exchange.context, body=open_call.body)

    def body(self, tenant: Tenant) -> Share:
        """The bytes of a body that is not that of an exchange yet."""
        return self._limits.body(tenant)

    async def read(
        self,
        exchange: HttpExchange,
        call: Call,
        model: type[B],
        convert: Callable[[B, str | None], T],
        *,
        keep: bool = False,
        may_have_name: bool = True,
    ) -> T:
        """Reads the body by its model; in a thread if it is large. `convert` also takes the idempotency key; without
        `may_have_name` that has no effect. With `keep` the body can be read once more, by a model that knows all its
        fields. Raises QuireError."""
        data = await exchange.read_json(keep=keep)
        name = _idempotency_key(exchange) if may_have_name else None

        def read() -> tuple[T, Sequence[str]]:
            body = parse_body(data)
            ignored = () if keep else self._undefined_fields.check(model, body.values)
            return convert(model.read(body), name), ignored

        cost = BODY_BYTE * len(data)
        result, exchange.ignored_fields = await self._threads.run_if_long(call.tenant.name, cost, read)
        return result

    async def convert(
        self, exchange: HttpExchange, call: Call, work: Callable[[], T], *, num_items: int, num_stored_bytes: int
    ) -> T:
        """Converts a body that was read, of `num_items` items with those that it continues, which are of so many bytes;
        in a thread if that is much. Raises as `work` does."""
        # Either shows how long it takes: there are large items and many small ones.
        cost = max(BODY_BYTE * (exchange.num_body_bytes + num_stored_bytes), CONVERSATION_ITEM * num_items)
        return await self._threads.run_if_long(call.tenant.name, cost, work)

    def find_model(
        self, exchange: HttpExchange, call: Call, name: str | None, field_path: FieldPath
    ) -> tuple[CatalogModel, ModelInfo]:
        """The model that a body names. Raises QuireError where there is none, or it is not ready."""
        model = self._request_manager.catalog.find(name, field_path, call.tenant)
        exchange.model = model.name
        return model, self._request_manager.model_info(model)

    async def encode(
        self,
        call: Call,
        found: tuple[CatalogModel, ModelInfo],
        prompt: TextPrompt | ChatPrompt,
        field_path: FieldPath,
    ) -> list[int]:
        """Tokens of a text, which may be empty, or of a chat. Raises QuireError, also for one of more than 16
        contexts."""
        (model, info), check = found, FieldChecker(field_path)
        most = _MAX_CONTEXTS * info.context_length
        try:
            token_ids = (await model.validator.encode(prompt, check, most, call.tenant.name)).token_ids
        except PromptTooLong:
            token_ids = None
        self.check_length(prompt_field(prompt), most + 1 if token_ids is None else len(token_ids), info, field_path)
        return token_ids or []

    def check_length(self, which: Field, num_tokens: int, info: ModelInfo, field_path: FieldPath) -> None:
        """Raises QuireError for tokens, of a call that generates none, that would fill more than 16 contexts."""
        if num_tokens > _MAX_CONTEXTS * info.context_length:
            message = f"has more tokens than {_MAX_CONTEXTS} contexts of {info.context_length}"
            raise QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field=field_path(which))

    async def validate(
        self, exchange: HttpExchange, call: Call, prompts: Sequence[PromptRequest]
    ) -> list[ValidatedRequest]:
        """The valid requests of a body's prompts, which have all other fields in common. Raises QuireError."""
        first = prompts[0]
        model = self._request_manager.catalog.find(first.unvalidated.model, first.field_path, call.tenant)
        exchange.model = model.name
        return await self._request_manager.validate_prompts(
            call,
            model,
            first.unvalidated,
            [(one.unvalidated.prompt, one.field_path) for one in prompts],
            exchange.request_id,
        )

    async def embed(self, exchange: HttpExchange, call: Call, unvalidated: UnvalidatedEmbeddings) -> InputValues:
        """The vectors of a call's inputs. Raises QuireError, and ClientDisconnected."""
        model, _ = self.find_model(exchange, call, unvalidated.model, unvalidated.field_path)
        validating = self._request_manager.validate_embeddings(call, model, unvalidated, exchange.request_id)
        embeddings = await _while_connected(exchange, validating)
        vectors, usage = await self._values(exchange, call, embeddings)
        return InputValues(vectors, model.name, usage)

    async def classify(
        self, exchange: HttpExchange, call: Call, unvalidated: UnvalidatedClassifications
    ) -> ClassifiedInputs:
        """The numbers of a call's inputs. Raises QuireError, and ClientDisconnected."""
        model, _ = self.find_model(exchange, call, unvalidated.model, unvalidated.field_path)
        validating = self._request_manager.validate_classifications(call, model, unvalidated, exchange.request_id)
        inputs = await _while_connected(exchange, validating)
        values, usage = await self._values(exchange, call, inputs)
        return ClassifiedInputs(values, model.name, usage, model.labels)

    async def score(self, exchange: HttpExchange, call: Call, unvalidated: UnvalidatedScores) -> ScoredPairs:
        """The scores of a call's pairs. Raises QuireError, and ClientDisconnected."""
        model, _ = self.find_model(exchange, call, unvalidated.model, unvalidated.field_path)
        validating = self._request_manager.validate_scores(call, model, unvalidated, exchange.request_id)
        validated = await _while_connected(exchange, validating)
        values, usage = await self._values(exchange, call, validated.requests)
        return ScoredPairs(values, model.name, usage, validated)

    def _begin(self, exchange: HttpExchange, *, cancels: bool = False) -> tuple[Tenant, OpenCall]:
        """The tenant, and what counts its call: the same where the handler of another route begins the call again."""
        tenant = self.login(exchange)
        if exchange.open_call is None:
            exchange.open_call = self._limits.begin(tenant, cancels=cancels)
        return tenant, exchange.open_call

    async def _values(
        self, exchange: HttpExchange, call: Call, requests: Sequence[ValidatedValue]
    ) -> tuple[list[Vector], Usage]:
        """The values of the prompts of a call."""
        async with (
            self._request_manager.run_values(call, requests) as group,
            exchange.watch_disconnect(group.client_disconnected),
        ):
            return await group.values(), group.usage

    @asynccontextmanager
    async def run(
        self,
        exchange: HttpExchange,
        call: Call,
        requests: Sequence[ValidatedRequest],
        resume_positions: Sequence[Mapping[int, ResumePosition]] = (),
    ) -> AsyncIterator[RequestGroup]:
        """Runs requests until the block ends or the client disconnects. They are accepted when the block begins."""
        async with (
            self._request_manager.run(call, requests, resume_positions) as group,
            exchange.watch_disconnect(group.client_disconnected),
        ):
            await group.accepted()
            exchange.is_durable = group.is_durable
            yield group


async def _while_connected(exchange: HttpExchange, work: Coroutine[Any, Any, T]) -> T:
    """The result of work on a body that was read; it is cancelled where the client disconnects. Raises
    ClientDisconnected, and as the work does."""
    task, has_left = asyncio.create_task(work), False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    async with exchange.watch_disconnect(leave):
        try:
            return await task
        except asyncio.CancelledError:
            if not has_left:
                raise
            raise ClientDisconnected from None


def _idempotency_key(exchange: HttpExchange) -> str | None:
    """The client's own id of the request, which is also the reply's."""
    name = exchange.header("Idempotency-Key")
    if name is not None and is_request_id(name):
        exchange.request_id = name
    return name


def _deadline(exchange: HttpExchange) -> float | None:
    """The client's deadline on the monotonic clock, in seconds."""
    header = exchange.header("x-request-timeout")
    if header is None:
        return None
    seconds = float(header) if _NUMBER.fullmatch(header) else math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        message = f"must be a number of seconds, above 0 and at most {_MAX_TIMEOUT_SECONDS:g}"
        raise QuireError(Reason.INVALID_FIELD, message, field="x-request-timeout")
    return time.monotonic() + seconds
