"""quire.inference.v1.InferenceService: the public gRPC API over the request manager."""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TypeVar

from gateway_svc.chats import ChatPrompt
from gateway_svc.chunk_sender import ChunkSender
from gateway_svc.classifications import UnvalidatedClassifications
from gateway_svc.client_call import Call
from gateway_svc.common_fields import is_request_id
from gateway_svc.embeddings import UnvalidatedEmbeddings
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, NamedFields, generation_field_path
from gateway_svc.grpc_answers import (
    ChunkResponse,
    acceptance,
    check_least_size,
    chunk_response,
    classified,
    embedded,
    missing_chunks,
    returned_prompt,
    whole_answer,
)
from gateway_svc.grpc_calls import REQUEST_ID, GrpcCalls, GrpcContext, reply_id
from gateway_svc.metrics import CallOutcome
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.output import Chunk
from gateway_svc.request_group import RequestGroup
from gateway_svc.request_manager import RequestManager
from gateway_svc.resume_position import EndDelivery, ResumePosition
from gateway_svc.running_request import RunningRequest
from gateway_svc.scores import UnvalidatedScores
from gateway_svc.tenant import Tenant
from gateway_svc.tokenizer import PromptTooLong
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import ResponseMode, TextPrompt, UnvalidatedRequest
from gateway_svc.validated_request import ModelInfo, SpecialTokens, ValidatedRequest
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.validation import max_prompt_tokens, prompt_field
from gateway_svc.value_inputs import Vector
from gateway_svc.vocabulary import Vocabulary
from gateway_svc.work_costs import CHAT_ITEM, LONG, VECTOR_NUMBER, answer_cost
from quire.inference.v1 import inference_pb2
from quire.inference.v1.inference_pb2_grpc import InferenceServiceServicer
from svc_common.errors import QuireError, Reason

T = TypeVar("T")

_PLAIN_FIELDS = NamedFields({Field.PROMPT: "input", Field.TOKEN_IDS: "token_ids"})
"""Fields of requests that hold no Generation."""

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class InferenceServicer(InferenceServiceServicer):
    """Every reply has x-request-id in its initial metadata, and an error in its trailing metadata."""

    def __init__(self, request_manager: RequestManager, calls: GrpcCalls) -> None:
        self._request_manager = request_manager
        self._calls = calls

    async def StreamGenerate(  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: GrpcContext
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        """Acceptance, chunks, usage."""
        request_id = reply_id(request.generation.request_id)
        async with self._calls.answer(context, "StreamGenerate", request_id) as outcome:
            call = self._calls.call(_operation(request.generation), context)
            generation = await self._validate(call, request.generation, ResponseMode.STREAMED, request_id, outcome)
            del request  # its bytes count no longer than until it is submitted
            async with self._request_manager.run(call, [generation]) as group:
                await group.accepted()
                await context.send_initial_metadata(((REQUEST_ID, request_id),))
                yield inference_pb2.StreamGenerateResponse(acceptance=acceptance(group.requests[0]))
                vocabulary, kind, is_first = group.vocabulary, inference_pb2.StreamGenerateResponse, True
                while chunks := await group.next():
                    if is_first and (prompt := await self._prompt(call, group.requests[0])) is not None:
                        yield inference_pb2.StreamGenerateResponse(prompt=prompt)
                    is_first = False
                    for response in await self._responses(call, kind, chunks, vocabulary):
                        yield response
                    await _send_as_they_come(context, group, kind)
                yield inference_pb2.StreamGenerateResponse(usage=group.usage.to_proto())

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: GrpcContext
    ) -> inference_pb2.GenerateResponse:
        request_id = reply_id(request.generation.request_id)
        async with self._calls.answer(context, "Generate", request_id) as outcome:
            call = self._calls.call(_operation(request.generation), context)
            generation = await self._validate(call, request.generation, ResponseMode.WHOLE, request_id, outcome)
            del request  # as above
            async with self._request_manager.run(call, [generation]) as group:
                (running,) = group.requests
                chunks: list[Chunk] = []
                while more := await group.next():
                    chunks += [chunk for _, chunk in more]
                    check_least_size(running)
                cost = answer_cost(running.num_logprobs, len(chunks), len(running.rendering.prompt_token_ids))
                response = await self._calls.render(call, cost, lambda: whole_answer(running, chunks))
                await context.send_initial_metadata(((REQUEST_ID, request_id),))
                return response

    async def Resume(  # noqa: N802
        self, request: inference_pb2.ResumeRequest, context: GrpcContext
    ) -> AsyncIterator[inference_pb2.ResumeResponse]:
        """Acceptance, the chunks that the client lacks, usage."""
        async with self._calls.answer(context, "Resume", request_id := reply_id(request.request_id)) as outcome:
            call = self._calls.call(Operation.RESUME, context)
            if not is_request_id(request.request_id):
                raise FieldChecker(_PLAIN_FIELDS).invalid(Field.REQUEST_ID, "is not the id of a request")
            resume_positions = _resume_positions(request.positions)
            with self._request_manager.resume(call, request_id, resume_positions) as group:
                await group.accepted()
                (running,) = group.requests
                rendering, vocabulary, outcome.model = running.rendering, running.vocabulary, running.model_name
                for item_index, position in enumerate(request.positions):
                    if position.index >= rendering.n:
                        message = f"must be below {rendering.n}, the number of sequences"
                        raise QuireError(Reason.INVALID_FIELD, message, field=f"positions[{item_index}].index")
                await context.send_initial_metadata(((REQUEST_ID, request_id),))
                yield inference_pb2.ResumeResponse(acceptance=acceptance(running))
                first = await group.all() if rendering.is_best_of else await group.next()
                if (prompt := await self._prompt(call, running)) is not None:
                    yield inference_pb2.ResumeResponse(prompt=prompt)
                if rendering.is_best_of:
                    missing = await self._calls.render(
                        call,
                        answer_cost(0, len(first)),
                        partial(missing_chunks, [chunk for _, chunk in first], resume_positions, rendering, vocabulary),
                    )
                else:
                    missing = first
                while missing:
                    for response in await self._responses(call, inference_pb2.ResumeResponse, missing, vocabulary):
                        yield response
                    if rendering.is_best_of:
                        break
                    await _send_as_they_come(context, group, inference_pb2.ResumeResponse)
                    missing = await group.next()
                yield inference_pb2.ResumeResponse(usage=group.usage.to_proto())

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: GrpcContext
    ) -> inference_pb2.CancelResponse:
        async with self._calls.answer(context, "Cancel", request_id := reply_id(request.request_id)):
            tenant = self._calls.tenant(context)
            if not is_request_id(request.request_id):
                raise FieldChecker(_PLAIN_FIELDS).invalid(Field.REQUEST_ID, "is not the id of a request")
            self._request_manager.cancel(tenant, request.request_id)
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return inference_pb2.CancelResponse()

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: GrpcContext
    ) -> inference_pb2.EmbedResponse:
        request_id = reply_id()
        async with self._calls.answer(context, "Embed", request_id) as outcome:
            call = self._calls.call(Operation.EMBEDDINGS, context)
            unvalidated = UnvalidatedEmbeddings.from_proto(request)
            model = self._calls.find_model(unvalidated.model, unvalidated.field_path, call.tenant, outcome)
            embeddings = await self._request_manager.validate_embeddings(call, model, unvalidated, request_id)
            response, usage = await self._values(call, embeddings, partial(embedded, model.name))
            response.usage.CopyFrom(usage)
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return response

    async def Classify(  # noqa: N802
        self, request: inference_pb2.ClassifyRequest, context: GrpcContext
    ) -> inference_pb2.ClassifyResponse:
        request_id = reply_id()
        async with self._calls.answer(context, "Classify", request_id) as outcome:
            call = self._calls.call(Operation.CLASSIFY, context)
            unvalidated = UnvalidatedClassifications.from_proto(request)
            model = self._calls.find_model(unvalidated.model, unvalidated.field_path, call.tenant, outcome)
            inputs = await self._request_manager.validate_classifications(call, model, unvalidated, request_id)
            response, usage = await self._values(call, inputs, partial(classified, model.name, model.labels))
            response.usage.CopyFrom(usage)
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return response

    async def Score(  # noqa: N802
        self, request: inference_pb2.ScoreRequest, context: GrpcContext
    ) -> inference_pb2.ScoreResponse:
        request_id = reply_id()
        async with self._calls.answer(context, "Score", request_id) as outcome:
            call = self._calls.call(Operation.SCORE, context)
            unvalidated = UnvalidatedScores.from_proto(request)
            model = self._calls.find_model(unvalidated.model, unvalidated.field_path, call.tenant, outcome)
            validated = await self._request_manager.validate_scores(call, model, unvalidated, request_id)
            scores, usage = await self._values(call, validated.requests, validated.read, validated.num_numbers)
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return inference_pb2.ScoreResponse(model=model.name, scores=scores, usage=usage)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: GrpcContext
    ) -> inference_pb2.TokenizeResponse:
        async with self._calls.answer(context, "Tokenize", request_id := reply_id()) as outcome:
            tenant = self._calls.tenant(context)
            check = FieldChecker(_PLAIN_FIELDS)
            model, info = self._find_model(request, tenant, outcome)
            prompt: TextPrompt | ChatPrompt | None = None
            match request.WhichOneof("input"):
                case "text":
                    prompt = TextPrompt(request.text)
                case "chat":
                    if len(request.chat.messages) > info.context_length:
                        raise _beyond_context(Field.MESSAGES, info)
                    read = partial(ChatPrompt.from_proto, request.chat, "chat")
                    prompt = await self._calls.convert(tenant, request.chat, read)
            try:
                encoded = await model.validator.encode(prompt, check, info.context_length, tenant.name)
                token_ids = encoded.token_ids
            except PromptTooLong:
                raise _beyond_context(prompt_field(prompt), info) from None
            if len(token_ids) > info.context_length:
                raise _beyond_context(prompt_field(prompt), info)
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, context_length=info.context_length)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: GrpcContext
    ) -> inference_pb2.DetokenizeResponse:
        async with self._calls.answer(context, "Detokenize", request_id := reply_id()) as outcome:
            tenant = self._calls.tenant(context)
            model, info = self._find_model(request, tenant, outcome)
            check = FieldChecker(_PLAIN_FIELDS)
            if len(request.token_ids) > info.context_length:
                raise _beyond_context(Field.TOKEN_IDS, info)
            check.token_ids(Field.TOKEN_IDS, request.token_ids, info)
            special = SpecialTokens.KEPT if request.keep_special_tokens else SpecialTokens.HIDDEN
            text = await model.tokenizer.decode(request.token_ids, special, tenant.name)
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: GrpcContext
    ) -> inference_pb2.ListModelsResponse:
        async with self._calls.answer(context, "ListModels", request_id := reply_id()):
            ready = self._request_manager.ready_models(self._calls.tenant(context))
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return inference_pb2.ListModelsResponse(models=[info.to_proto(model.aliases) for model, info in ready])

    async def _prompt(self, call: Call, running: RunningRequest) -> inference_pb2.Prompt | None:
        """The prompt of a request that has begun, if it is returned."""
        rendering = running.rendering
        cost = answer_cost(rendering.num_logprobs(0), num_prompt_tokens=len(rendering.prompt_token_ids))
        return await self._calls.render(call, cost, lambda: returned_prompt(running))

    async def _responses(
        self, call: Call, kind: Callable[[], ChunkResponse], chunks: Sequence[tuple[int, Chunk]], vocabulary: Vocabulary
    ) -> Sequence[ChunkResponse]:
        """A response for each chunk: thousands of tokens, where a client resumes or reads slowly."""

        def rendered() -> list[ChunkResponse]:
            return [chunk_response(kind, vocabulary, chunk) for _, chunk in chunks]

        cost = answer_cost(sum([chunk.num_logprobs for _, chunk in chunks]))
        return await self._calls.render(call, cost, rendered) if cost else rendered()

    async def _values(
        self,
        call: Call,
        requests: Sequence[ValidatedValue],
        read: Callable[[Sequence[Vector]], T],
        num_numbers: Callable[[Sequence[Vector]], int] = lambda values: sum(map(len, values)),
    ) -> tuple[T, inference_pb2.Usage]:
        """What `read` makes of the values of a call's prompts, of which it takes `num_numbers`; and the tokens that
        were processed."""
        async with self._request_manager.run_values(call, requests) as group:
            values = await group.values()
        cost = VECTOR_NUMBER * num_numbers(values)
        return await self._calls.render(call, cost, lambda: read(values)), group.usage.to_proto()

    async def _validate(
        self,
        call: Call,
        generation: inference_pb2.Generation,
        response_mode: ResponseMode,
        request_id: str,
        outcome: CallOutcome,
    ) -> ValidatedRequest:
        name = generation.model if generation.HasField("model") else None
        model = self._calls.find_model(name, generation_field_path, call.tenant, outcome)
        if CHAT_ITEM * (num_messages := len(generation.chat.messages)) > LONG:
            info = self._request_manager.model_info(model)
            is_truncated = generation.HasField("truncate_prompt_tokens")
            if num_messages > max_prompt_tokens(info, is_truncated=is_truncated):
                raise FieldChecker(generation_field_path).too_long(Field.MESSAGES, None, info)
        read = partial(UnvalidatedRequest.from_proto, generation, response_mode)
        unvalidated = await self._calls.convert(call.tenant, generation.chat, read)
        return await self._request_manager.validate(call, model, unvalidated, generation_field_path, request_id)

    def _find_model(
        self,
        request: inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest,
        tenant: Tenant,
        outcome: CallOutcome,
    ) -> tuple[CatalogModel, ModelInfo]:
        """The model of a Tokenize or Detokenize request. Raises QuireError where it is not ready."""
        name = request.model if request.HasField("model") else None
        model = self._calls.find_model(name, _PLAIN_FIELDS, tenant, outcome)
        return model, self._request_manager.model_info(model)


async def _send_as_they_come(context: GrpcContext, group: RequestGroup, kind: Callable[[], ChunkResponse]) -> None:
    """Sends the chunks of a call's requests to their end, unless they have log-probabilities: those take a thread."""
    if not any(rendering.has_logprobs for rendering in group.renderings):
        await ChunkSender(context, group, partial(chunk_response, kind, group.vocabulary)).run()


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


def _beyond_context(which: Field, model: ModelInfo) -> QuireError:
    """The error to raise about a text, or tokens, of Tokenize or Detokenize."""
    message = f"has more tokens than the context, which has {model.context_length}"
    return QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field=_PLAIN_FIELDS(which))
