"""inference.GRPCInferenceService: the Open Inference Protocol of KServe and Triton, over the request manager."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

import grpc

from gateway_svc.client_call import Call
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.grpc_calls import REQUEST_ID, GrpcCalls, GrpcContext, reply_id
from gateway_svc.metrics import CallOutcome
from gateway_svc.open_inference.requests import INPUTS, OUTPUTS, VERSION, InferRequest, Output, check_version
from gateway_svc.open_inference.response_stream import ResponseStream
from gateway_svc.open_inference.tensors import add_count, add_texts
from gateway_svc.output import Chunk, Usage
from gateway_svc.ranking import completed_sequences
from gateway_svc.request_group import RequestGroup
from gateway_svc.request_manager import RequestManager
from gateway_svc.slow_messages import receive_next
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import ResponseMode
from gateway_svc.validated_request import ValidatedRequest
from gateway_svc.work_costs import answer_cost
from quire.open_inference.v2 import open_inference_pb2 as pb
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.gateway")

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

_MAX_CONCURRENT = 128  # requests of one stream; further messages are read as those end
_FINAL = "triton_final_response"
_METADATA_FIELDS = NamedFields({Field.MODEL: "name"})
_REASON, _RETRY_AFTER = "error_reason", "retry_after"  # of an error, the latter in seconds

Send = Callable[[pb.ModelInferResponse], Awaitable[None]]


class OpenInferenceServicer(GRPCInferenceServiceServicer):
    """A request's id is returned to the client and names nothing: clients need not choose unique ones."""

    def __init__(self, request_manager: RequestManager, calls: GrpcCalls) -> None:
        self._request_manager = request_manager
        self._calls = calls
        try:
            self._version = version("quire")
        except PackageNotFoundError:  # run from a checkout that is not installed
            self._version = "0+unknown"

    async def ServerLive(  # noqa: N802
        self, request: pb.ServerLiveRequest, context: GrpcContext
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: pb.ServerReadyRequest, context: GrpcContext
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._request_manager.is_ready)

    async def ModelReady(  # noqa: N802
        self, request: pb.ModelReadyRequest, context: GrpcContext
    ) -> pb.ModelReadyResponse:
        async with self._calls.answer(context, "ModelReady", reply_id()) as outcome:
            call = self._calls.call(Operation.TEXT_COMPLETION, context)
            try:
                check_version(request.version, "version")
                self._request_manager.model_info(
                    self._calls.find_model(request.name or None, _METADATA_FIELDS, call.tenant, outcome)
                )
            except QuireError as error:
                if error.reason not in (Reason.MODEL_NOT_FOUND, Reason.MODEL_NOT_READY):
                    raise
                return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: GrpcContext
    ) -> pb.ServerMetadataResponse:
        async with self._calls.answer(context, "ServerMetadata", reply_id()):
            self._calls.tenant(context)
        return pb.ServerMetadataResponse(name="quire", version=self._version)

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: GrpcContext
    ) -> pb.ModelMetadataResponse:
        async with self._calls.answer(context, "ModelMetadata", reply_id()) as outcome:
            call = self._calls.call(Operation.TEXT_COMPLETION, context)
            check_version(request.version, "version")
            model = self._calls.find_model(request.name or None, _METADATA_FIELDS, call.tenant, outcome)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform="quire",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()],
            outputs=[tensor(name=one.value, datatype=datatype, shape=[-1]) for one, datatype in OUTPUTS.items()],
        )

    async def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: GrpcContext
    ) -> pb.ModelInferResponse:
        request_id = reply_id()
        async with self._calls.answer(context, "ModelInfer", request_id) as outcome:
            call = self._calls.call(Operation.TEXT_COMPLETION, context)
            asked = InferRequest.from_proto(request)
            if asked.response_mode is ResponseMode.STREAMED:
                raise QuireError(Reason.INVALID_FIELD, "must be false: ModelStreamInfer streams", field="stream")
            del request  # its bytes count no longer than until it is submitted
            valid = await self._validate(asked, call, request_id, outcome)
            async with self._request_manager.run(call, [valid]) as group:
                response = await self._whole(call, asked, group)
                await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return response

    async def ModelStreamInfer(  # type: ignore[override]  # noqa: N802  # it writes to the context itself
        self, requests: AsyncIterator[pb.ModelInferRequest], context: GrpcContext
    ) -> None:
        """The responses of different requests interleave. A request that fails has an error, and the stream goes on."""
        async with self._calls.answer(context, "ModelStreamInfer", reply_id()) as outcome:
            tenant = self._calls.tenant(context)
            stream, places = ResponseStream(context), asyncio.Semaphore(_MAX_CONCURRENT)
            tasks = set[asyncio.Task[None]]()

            async def send(response: pb.ModelInferResponse) -> None:
                await stream.write(pb.ModelStreamInferResponse(infer_response=response))

            async def respond(request: pb.ModelInferRequest) -> None:
                model_name, request_id = request.model_name, request.id
                try:
                    with self._calls.message(Operation.TEXT_COMPLETION, context) as call:
                        streaming = self._stream(request, call, outcome, send)
                        del request  # its bytes count no longer than until it is submitted
                        await streaming
                except grpc.aio.InternalError:
                    pass  # a write after the client has left
                except Exception as failure:
                    error = _error(failure)
                    self._calls.note(error)
                    failed = pb.ModelInferResponse(model_name=model_name, id=request_id)
                    failed.parameters[_FINAL].bool_param = True
                    failed.parameters[_REASON].string_param = error.reason.value
                    if error.retry_after is not None:
                        failed.parameters[_RETRY_AFTER].double_param = error.retry_after
                    response = pb.ModelStreamInferResponse(error_message=str(error), infer_response=failed)
                    await stream.write(response)
                finally:
                    places.release()

            try:
                messages, slow = aiter(requests), self._calls.slow_messages(tenant)
                while True:
                    await places.acquire()  # before a message is read: one that waited would not count
                    try:
                        request = await receive_next(messages, slow, tasks)
                    except StopAsyncIteration:
                        break
                    tasks.add(task := asyncio.create_task(respond(request)))
                    task.add_done_callback(tasks.discard)
                    del request
                await asyncio.gather(*tasks)
            finally:
                await stream.end(tasks)

    async def _stream(self, request: pb.ModelInferRequest, call: Call, outcome: CallOutcome, send: Send) -> None:
        """Sends the responses to one request of a stream. Raises QuireError."""
        asked = InferRequest.from_proto(request)
        del request
        valid = await self._validate(asked, call, reply_id(), outcome)
        async with self._request_manager.run(call, [valid]) as group:
            if asked.response_mode is ResponseMode.WHOLE:
                response = await self._whole(call, asked, group)
                response.parameters[_FINAL].bool_param = True
                await send(response)
                return
            while chunks := await group.next():
                for _, chunk in chunks:
                    if not chunk.text and chunk.finish is None:
                        continue
                    response = _response(asked, group, [chunk])
                    response.parameters[_FINAL].bool_param = chunk.finish is not None
                    await send(response)

    async def _whole(self, call: Call, asked: InferRequest, group: RequestGroup) -> pb.ModelInferResponse:
        """The only response to a request that is not streamed."""
        chunks = [chunk for _, chunk in await group.all()]
        (rendering,) = group.renderings
        return await self._calls.render(
            call,
            answer_cost(0, len(chunks)),
            lambda: _response(asked, group, completed_sequences(chunks, rendering)),
        )

    async def _validate(
        self, asked: InferRequest, call: Call, request_id: str, outcome: CallOutcome
    ) -> ValidatedRequest:
        unvalidated, field_path = asked.prompt.unvalidated, asked.prompt.field_path
        model = self._calls.find_model(unvalidated.model, field_path, call.tenant, outcome)
        return await self._request_manager.validate(call, model, unvalidated, field_path, request_id)


def _error(failure: Exception) -> QuireError:
    """The error that a client gets of a failure: no text of an exception but QuireError's."""
    if isinstance(failure, QuireError):
        return failure
    error_id = uuid.uuid4().hex
    logger.error(
        "internal error", exc_info=failure, extra={"error_id": error_id, "method": f"/{SERVICE}/ModelStreamInfer"}
    )
    return QuireError(Reason.INTERNAL, f"internal error {error_id}")


def _response(asked: InferRequest, group: RequestGroup, chunks: list[Chunk]) -> pb.ModelInferResponse:
    """A response with one text for each chunk."""
    (rendering,) = group.renderings
    response = pb.ModelInferResponse(model_name=rendering.model, model_version=VERSION, id=asked.id)
    usage: Usage = group.usage
    for output in OUTPUTS:
        if output not in asked.outputs:
            continue
        match output:
            case Output.TEXT:
                add_texts(response, output.value, [asked.prefix + chunk.text for chunk in chunks])
            case Output.FINISH_REASON:
                reasons = [chunk.finish.reason.value if chunk.finish else "" for chunk in chunks]
                add_texts(response, output.value, reasons)
            case Output.INPUT_TOKENS:
                add_count(response, output.value, usage.prompt_tokens)
            case Output.OUTPUT_TOKENS:
                add_count(response, output.value, usage.completion_tokens)
    return response
