"""Quire through generated code: python example.py ADDRESS. With reconnection and resumption done, see quire_client.

Needs the packages grpcio, grpcio-status and googleapis-common-protos, and code generated from inference.proto:

    python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. quire/inference/v1/inference.proto
"""

import sys
import uuid
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.inference.v1 import inference_pb2 as api
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub

SERVICE_CONFIG = Path(__file__).parents[2] / "quire_client" / "service_config.json"


def generation(**fields: object) -> api.Generation:
    """A request for at most 16 tokens."""
    stopping = api.Stopping(max_tokens=16)
    return api.Generation(text="A quire is", stopping=stopping, **fields)  # type: ignore[arg-type]


def generate(stub: InferenceServiceStub) -> None:
    """One response with the whole text."""
    request = api.GenerateRequest(generation=generation(sampling=api.Sampling(temperature=0)))
    response = stub.Generate(request, timeout=60)
    print("generated:", response.completions[0].text)


def stream(stub: InferenceServiceStub) -> None:
    """Chunks as they come, between the acceptance and the usage."""
    messages = stub.StreamGenerate(api.StreamGenerateRequest(generation=generation()), timeout=60)
    print("streamed:", "".join(message.chunk.text for message in messages))


def fail(stub: InferenceServiceStub) -> None:
    """An error: its code, its reason, and the field at fault."""
    try:
        stub.Generate(api.GenerateRequest(generation=generation(sampling=api.Sampling(temperature=9))), timeout=60)
    except grpc.RpcError as error:
        reason, field = "", ""
        for detail in rpc_status.from_call(error).details:
            info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            if detail.Unpack(info):
                reason = info.reason
            if detail.Unpack(bad_request):
                field = bad_request.field_violations[0].field
        print("error:", error.code().name, reason, field)


def resume(stub: InferenceServiceStub) -> None:
    """A stream that breaks, and its rest: a request with a name can be resumed, on any gateway."""
    request_id = str(uuid.uuid4())
    request = api.StreamGenerateRequest(generation=generation(request_id=request_id))
    call = stub.StreamGenerate(request, timeout=60)
    chunk = next(message.chunk for message in call if message.HasField("chunk"))
    call.cancel()
    position = api.Position(index=0, next_offset=chunk.offset + len(chunk.token_ids))
    rest = stub.Resume(api.ResumeRequest(request_id=request_id, positions=[position]), timeout=60)
    print(f"resumed: {chunk.text}|{''.join(message.chunk.text for message in rest)}")


if __name__ == "__main__":
    options = [("grpc.service_config", SERVICE_CONFIG.read_text())]
    with grpc.insecure_channel(sys.argv[1], options=options) as channel:
        service = InferenceServiceStub(channel)
        for part in (generate, stream, fail, resume):
            part(service)
