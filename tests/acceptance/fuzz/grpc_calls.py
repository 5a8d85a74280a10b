"""Generated calls of all methods that a gateway's reflection lists, and the check of what they end with."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from svc_common.errors import DOMAIN, QuireError, Reason
from tests.acceptance.fuzz.messages import Likely, encodings, messages
from tests.acceptance.fuzz.rounds import INTERNAL_ERROR, NEVER, Findings, Plan, run_rounds

_SECONDS = 120.0
_SHORT_SECONDS = 0.05
_WATCH_SECONDS = 0.2  # a stream without an end
_MAX_RESPONSES = 100  # that are read of a stream before it is cancelled
_MAX_SHOWN = 400  # characters
_HEALTH = "/grpc.health.v1.Health/"


@dataclass(frozen=True)
class FuzzCall:
    """A call with the bytes of its messages: one, unless the method takes a stream."""

    method: MethodDescriptor
    data: tuple[bytes, ...]
    seconds: float

    @property
    def path(self) -> str:
        """/package.Service/Method."""
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    def __str__(self) -> str:
        """The beginning of each message as text, where it parses, and all of its bytes."""
        shown = [f"{_as_text(self.method, data)[:_MAX_SHOWN]} ({data.hex()})" for data in self.data]
        return f"{self.path} within {self.seconds} s: {'; '.join(shown)}"


def _as_text(method: MethodDescriptor, data: bytes) -> str:
    with contextlib.suppress(Exception):
        return " ".join(str(GetMessageClass(method.input_type).FromString(data)).split())
    return "malformed"


def likely_values(model: str) -> Likely:
    """Values with which many requests are accepted, and have short answers."""
    schemas = ['{"type": "integer"}', '{"enum": ["a"]}', "{", '{"items":' * 1000, "[" * 100_000]
    models = st.sampled_from([model, model, model, "other"])
    return Likely(
        {
            "model": models,
            "model_name": models,
            "text": st.sampled_from(["A quire is", "a", "e\u0301", "<|im_start|>"]),
            "content": st.sampled_from(["Hello", "😀", "<|im_end|>"]),
            "role": st.sampled_from(["user", "user", "assistant", "system", "tool"]),
            "max_tokens": st.integers(1, 8),
            "request_id": st.integers(0, 15).map("fuzz-{}".format),
            "next_offset": st.integers(0, 8),
            "json_schema": st.sampled_from(schemas),
            "regex": st.sampled_from(["[ab]+", "(", "(a{1,100}){1,100}"]),
            "parameters": st.sampled_from(["max_tokens", "temperature", "n", "logprobs", "stream", "a"]),
            "datatype": st.sampled_from(["BYTES", "BYTES", "UINT32", ""]),
            "shape": st.just(1),
            "bytes_contents": st.just(b"A quire is"),
            "name": st.sampled_from(["text_input", "text_input", model, "sampling_parameters"]),
            "file_containing_symbol": st.sampled_from(["quire.inference.v1.Generation", "a"]),
        },
        frozenset({"generation", "stopping", "inputs", "contents", "messages"}),
    )


def public_methods(channel: grpc.Channel) -> list[MethodDescriptor]:
    """The methods of all services that reflection lists."""
    database = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(database)
    services = [pool.FindServiceByName(name) for name in sorted(database.get_services())]
    return [method for service in services for method in service.methods]


@st.composite
def calls(draw: DrawFn, methods: Sequence[MethodDescriptor], likely: Likely) -> FuzzCall:
    """Calls of these methods."""
    method = draw(st.sampled_from(methods))
    count = draw(st.integers(1, 3)) if method.client_streaming else 1
    data = tuple(draw(encodings(draw(messages(method.input_type, likely)))) for _ in range(count))
    seconds = draw(st.sampled_from([_SECONDS] * 9 + [_SHORT_SECONDS]))
    return FuzzCall(method, data, _WATCH_SECONDS if method.name == "Watch" else seconds)


def fuzz_grpc(address: str, model: str, plan: Plan, findings: Findings) -> None:
    """Sends generated calls to a gateway that serves a model."""
    with grpc.insecure_channel(address) as channel:
        methods = public_methods(channel)
        findings.print_line(f"grpc: {len(methods)} methods of {sorted({m.containing_service.name for m in methods})}")

        def send(call: FuzzCall, seed: int) -> None:
            code, problem = _outcome(channel, call)
            findings.answered(code)
            if problem is not None:
                findings.add(f"{call.path}: {problem}", seed, str(call))

        run_rounds("grpc", plan, calls(methods, likely_values(model)), send, findings.print_line)


def _outcome(channel: grpc.Channel, call: FuzzCall) -> tuple[str, str | None]:
    """The status with which a call ends, and what is wrong with it or with a response."""
    try:
        for response in _responses(channel, call):
            if INTERNAL_ERROR.search(str(response)):
                return "OK", "a response has an internal error"
    except grpc.RpcError as error:
        return error.code().name, problem_of_error(error, call)
    return "OK", None


def _responses(channel: grpc.Channel, call: FuzzCall) -> Iterator[Any]:
    """The responses, or the first of a long stream. Raises RpcError, also for a response that does not parse."""
    method = call.method
    kinds = ("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
    make: Callable[..., Any] = getattr(channel, "_".join(kinds))
    invoke = make(call.path, None, GetMessageClass(method.output_type).FromString)
    answer = invoke(iter(call.data) if method.client_streaming else call.data[0], timeout=call.seconds)
    if not method.server_streaming:
        yield answer
        return
    try:
        yield from islice(answer, _MAX_RESPONSES)
    finally:
        answer.cancel()


def problem_of_error(error: Any, call: FuzzCall) -> str | None:
    """What is wrong with an error: it must have a reason and a code that docs/api.md lists, and fit the reason."""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and call.seconds < _SECONDS:
        return None
    if code is grpc.StatusCode.NOT_FOUND and call.path.startswith(_HEALTH):
        return None  # that of grpc.health.v1 for a service that it does not know
    try:
        status = rpc_status.from_call(error)
    except ValueError as mismatch:
        return f"{code.name} with other details\n  {mismatch}"
    details = {detail.TypeName(): detail for detail in status.details} if status is not None else {}
    info = error_details_pb2.ErrorInfo()
    if (packed := details.get(info.DESCRIPTOR.full_name)) is None:
        return f"{code.name} without a reason\n  {error.details()}"
    packed.Unpack(info)
    if info.domain != DOMAIN or info.reason not in Reason.__members__:
        return f"{code.name} with the reason {info.reason} of {info.domain}"
    reason = Reason(info.reason)
    if reason in NEVER or QuireError(reason, "").code is not code:
        return f"{code.name} with the reason {reason}"
    if reason is Reason.CAPACITY_EXHAUSTED and "google.rpc.RetryInfo" not in details:
        return f"{reason} without the time to wait"
    return None
