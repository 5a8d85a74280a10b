"""quire.inference.v1.InferenceService: the public gRPC API over the request manager."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
from grpc_status import rpc_status
from opentelemetry import context as otel

from gateway_svc.auth import CREDENTIAL_HEADERS, Authenticator
from gateway_svc.chats import ChatPrompt
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, contract_field_path
from gateway_svc.metrics import CallOutcome
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.ranking import completed_sequences
from gateway_svc.request_manager import Call, RequestManager
from gateway_svc.running_request import RunningRequest
from gateway_svc.sequence_output import EndDelivery, ResumePosition, remainder
from gateway_svc.tenant import Tenant
from gateway_svc.tokenizer import PromptTooLong
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import ResponseMode, TextPrompt, UnvalidatedRequest
from gateway_svc.validated_request import ModelInfo, SpecialTokens, ValidatedRequest
from gateway_svc.validation import is_request_id, prompt_field
from quire.inference.v1 import inference_pb2
from quire.inference.v1.inference_pb2_grpc import InferenceServiceServicer
from svc_common.errors import QuireError, Reason

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

_REQUEST_ID = "x-request-id"
_PUSHBACK = "grpc-retry-pushback-ms"
_LATER_SECONDS = 2.0  # longer than a channel waits between its own retries
_ENDLESS_SECONDS = 1e9  # a deadline decades away counts as none


class InferenceServicer(InferenceServiceServicer):
    """Every reply has x-request-id in its initial metadata, and an error in its trailing metadata."""

    def __init__(self, request_manager: RequestManager, authenticator: Authenticator) -> None:
        self._request_manager = request_manager
        self._authenticator = authenticator

    def is_allowed(self, method: str, context: _Context) -> bool:
        """Whether the message of a call is to be read. Other services of the port, such as health, need no key."""
        if not method.startswith(f"/{SERVICE}/"):
            return True
        try:
            self._authenticator.tenant(_credentials(context))
        except QuireError:
            return False
        return True

    def check_credential(self, _: str, context: _Context) -> None:
        """Raises LoginRefused for a call without a valid credential. Only reflection has calls that need this."""
        self._tenant(context)

    async def StreamGenerate(  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        """Acceptance, chunks, usage."""
        request_id = _reply_id(request.generation.request_id)
        async with self._answer(context, "StreamGenerate", request_id) as outcome:
            call = self._call(_operation(request.generation), context)
            generation = await self._validate(call, request.generation, ResponseMode.STREAMED, request_id, outcome)
            with self._request_manager.run(call, [generation]) as group:
                await group.accepted()
                await context.send_initial_metadata(((_REQUEST_ID, request_id),))
                yield inference_pb2.StreamGenerateResponse(acceptance=_acceptance(group.requests[0]))
                vocabulary = group.vocabulary
                while chunks := await group.next():
                    for _, chunk in chunks:
                        yield inference_pb2.StreamGenerateResponse(chunk=chunk.to_proto(vocabulary))
                yield inference_pb2.StreamGenerateResponse(usage=group.usage.to_proto())

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        request_id = _reply_id(request.generation.request_id)
        async with self._answer(context, "Generate", request_id) as outcome:
            call = self._call(_operation(request.generation), context)
            generation = await self._validate(call, request.generation, ResponseMode.WHOLE, request_id, outcome)
            with self._request_manager.run(call, [generation]) as group:
                (running,) = group.requests
                chunks = completed_sequences([chunk for _, chunk in await group.all()], running.rendering)
                await context.send_initial_metadata(((_REQUEST_ID, request_id),))
        return inference_pb2.GenerateResponse(
            acceptance=_acceptance(running),
            completions=[whole.to_completion(running.vocabulary) for whole in chunks],
            usage=group.usage.to_proto(),
        )

    async def Resume(  # noqa: N802
        self, request: inference_pb2.ResumeRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.ResumeResponse]:
        """Acceptance, the chunks that the client lacks, usage."""
        async with self._answer(context, "Resume", request_id := _reply_id(request.request_id)) as outcome:
            call = self._call(Operation.RESUME, context)
            if not is_request_id(request.request_id):
                raise FieldChecker(_plain_field_path).invalid(Field.REQUEST_ID, "is not the id of a request")
            resume_positions = _resume_positions(request.positions)
            with self._request_manager.resume(call, request_id, resume_positions) as group:
                await group.accepted()
                (running,) = group.requests
                rendering, vocabulary, outcome.model = running.rendering, running.vocabulary, running.model_name
                for item_index, position in enumerate(request.positions):
                    if position.index >= rendering.n:
                        message = f"must be below {rendering.n}, the number of sequences"
                        raise QuireError(Reason.INVALID_FIELD, message, field=f"positions[{item_index}].index")
                await context.send_initial_metadata(((_REQUEST_ID, request_id),))
                yield inference_pb2.ResumeResponse(acceptance=_acceptance(running))
                if rendering.is_best_of:
                    for whole in completed_sequences([chunk for _, chunk in await group.all()], rendering):
                        rest = remainder(
                            whole, resume_positions.get(whole.index, ResumePosition()), vocabulary, rendering
                        )
                        yield inference_pb2.ResumeResponse(chunk=rest.to_proto(vocabulary))
                while chunks := await group.next():
                    for _, chunk in chunks:
                        yield inference_pb2.ResumeResponse(chunk=chunk.to_proto(vocabulary))
                yield inference_pb2.ResumeResponse(usage=group.usage.to_proto())

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: _Context
    ) -> inference_pb2.CancelResponse:
        async with self._answer(context, "Cancel", request_id := _reply_id(request.request_id)):
            tenant = self._tenant(context)
            if not is_request_id(request.request_id):
                raise FieldChecker(_plain_field_path).invalid(Field.REQUEST_ID, "is not the id of a request")
            self._request_manager.cancel(tenant, request.request_id)
            await context.send_initial_metadata(((_REQUEST_ID, request_id),))
        return inference_pb2.CancelResponse()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        async with self._answer(context, "Tokenize", request_id := _reply_id("")) as outcome:
            tenant = self._tenant(context)
            check = FieldChecker(_plain_field_path)
            model, info = self._find_model(request, tenant, outcome)
            prompt: TextPrompt | ChatPrompt | None = None
            match request.WhichOneof("input"):
                case "text":
                    prompt = TextPrompt(request.text)
                case "chat":
                    prompt = ChatPrompt.from_proto(request.chat, "chat")
            try:
                encoded = await model.validator.encode(prompt, check, info.context_length, tenant.name)
                token_ids = encoded.token_ids
            except PromptTooLong:
                raise _beyond_context(prompt_field(prompt), info) from None
            if len(token_ids) > info.context_length:
                raise _beyond_context(prompt_field(prompt), info)
            await context.send_initial_metadata(((_REQUEST_ID, request_id),))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, context_length=info.context_length)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        async with self._answer(context, "Detokenize", request_id := _reply_id("")) as outcome:
            tenant = self._tenant(context)
            model, info = self._find_model(request, tenant, outcome)
            check = FieldChecker(_plain_field_path)
            if len(request.token_ids) > info.context_length:
                raise _beyond_context(Field.TOKEN_IDS, info)
            check.token_ids(Field.TOKEN_IDS, request.token_ids, info)
            special = SpecialTokens.KEPT if request.keep_special_tokens else SpecialTokens.HIDDEN
            text = await model.tokenizer.decode(request.token_ids, special, tenant.name)
            await context.send_initial_metadata(((_REQUEST_ID, request_id),))
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        async with self._answer(context, "ListModels", request_id := _reply_id("")):
            ready = self._request_manager.ready_models(self._tenant(context))
            await context.send_initial_metadata(((_REQUEST_ID, request_id),))
        return inference_pb2.ListModelsResponse(models=[info.to_proto(model.aliases) for model, info in ready])

    @asynccontextmanager
    async def _answer(self, context: _Context, method: str, request_id: str) -> AsyncIterator[CallOutcome]:
        """Counts a call, and ends it with the status of a QuireError. The block sets the model that it is for.

        An error has no initial metadata, so that a client's retry policy may act on it.
        """
        with self._request_manager.metrics.call("grpc", method, grpc.StatusCode.OK.name) as outcome:
            try:
                yield outcome
            except QuireError as error:
                outcome.code = error.code.name
                metadata: list[tuple[str, str | bytes]] = [
                    (rpc_status.GRPC_DETAILS_METADATA_KEY, error.details()),
                    (_REQUEST_ID, request_id),
                ]
                if not _is_for_the_channel(error):
                    metadata.append((_PUSHBACK, "-1"))
                await context.abort(error.code, str(error), trailing_metadata=tuple(metadata))
            except (asyncio.CancelledError, GeneratorExit):
                time_left = context.time_remaining()
                late = time_left is not None and time_left <= 0
                outcome.code = (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name
                raise
            except Exception:
                outcome.code = grpc.StatusCode.INTERNAL.name
                raise

    def _call(self, operation: Operation, context: _Context) -> Call:
        time_left = context.time_remaining()
        deadline = None
        if time_left is not None and time_left < _ENDLESS_SECONDS:
            deadline = time.monotonic() + time_left
        return Call(
            tenant=self._tenant(context),
            operation=operation,
            deadline=deadline,
            parent=otel.get_current(),
        )

    async def _validate(
        self,
        call: Call,
        generation: inference_pb2.Generation,
        response_mode: ResponseMode,
        request_id: str,
        outcome: CallOutcome,
    ) -> ValidatedRequest:
        unvalidated = UnvalidatedRequest.from_proto(generation, response_mode)
        model = self._request_manager.catalog.find(unvalidated.model, generation_field_path, call.tenant)
        outcome.model = model.name
        return await self._request_manager.validate(call, model, unvalidated, generation_field_path, request_id)

    def _find_model(
        self,
        request: inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest,
        tenant: Tenant,
        outcome: CallOutcome,
    ) -> tuple[CatalogModel, ModelInfo]:
        """The model of a Tokenize or Detokenize request. Raises QuireError where it is not ready."""
        name = request.model if request.HasField("model") else None
        model = self._request_manager.catalog.find(name, _plain_field_path, tenant)
        outcome.model = model.name
        return model, self._request_manager.model_info(model)

    def _tenant(self, context: _Context) -> Tenant:
        return self._authenticator.login(_credentials(context), "grpc", context.peer())


def _credentials(context: _Context) -> list[tuple[str, str]]:
    names = {name.lower() for name in CREDENTIAL_HEADERS}
    metadata = context.invocation_metadata() or ()
    return [(name, value) for name, value in metadata if name in names and isinstance(value, str)]


def _reply_id(request_id: str) -> str:
    """The id of a reply: the client's, where that is a valid one."""
    return request_id if is_request_id(request_id) else uuid.uuid4().hex


def _is_for_the_channel(error: QuireError) -> bool:
    """Whether a client's own retry policy may act on an error, or must leave it to the caller.

    A retry policy retries at once, which adds to the load, and with the same deadline, which is then harder to meet.
    """
    if error.reason is Reason.DEADLINE_TOO_SHORT:
        return False
    return error.retry_after is None or error.retry_after <= _LATER_SECONDS


def _operation(generation: inference_pb2.Generation) -> Operation:
    return Operation.CHAT if generation.WhichOneof("prompt") == "chat" else Operation.TEXT_COMPLETION


def _resume_positions(positions: Sequence[inference_pb2.Position]) -> dict[int, ResumePosition]:
    """A client's position in each sequence."""
    resume_positions: dict[int, ResumePosition] = {}
    for item_index, position in enumerate(positions):
        where = f"positions[{item_index}]"
        if position.index in resume_positions:
            raise QuireError(Reason.INVALID_FIELD, "is there twice", field=f"{where}.index")
        resume_positions[position.index] = ResumePosition(
            position.next_offset, EndDelivery.UNKNOWN, f"{where}.next_offset"
        )
    return resume_positions


def _acceptance(running: RunningRequest) -> inference_pb2.Acceptance:
    rendering = running.rendering
    return inference_pb2.Acceptance(
        request_id=rendering.request_id, model=rendering.model, seed=rendering.seed, is_durable=running.is_durable
    )


def generation_field_path(which: str, item_index: int | None = None) -> str:
    """A field as spelled in a request that holds a Generation."""
    return f"generation.{contract_field_path(which, item_index)}"


def _plain_field_path(which: str, item_index: int | None = None) -> str:
    """A field as spelled in Tokenize and Detokenize requests."""
    names: dict[str, str] = {Field.PROMPT: "input", Field.TOKEN_IDS: "token_ids"}
    name = names.get(which, which)
    return name if item_index is None else f"{name}[{item_index}]"


def _beyond_context(which: Field, model: ModelInfo) -> QuireError:
    """The error to raise about a text, or tokens, of Tokenize or Detokenize."""
    message = f"has more tokens than the context, which has {model.context_length}"
    return QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field=_plain_field_path(which))
