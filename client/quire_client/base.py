"""The parts of both clients that do not wait: arguments become calls, and streams keep their state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, Unpack

from quire.inference.v1 import inference_pb2 as pb
from quire_client import requests
from quire_client.chats import Messages
from quire_client.connection import Connection
from quire_client.errors import closed
from quire_client.requests import CallOptions, GenerationOptions, Prompt
from quire_client.results import Acceptance, ReturnedPrompt, Usage
from quire_client.resumable_stream import EndpointList, OnResume, ResumableStream, RetryPolicy


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A request that is ready to be sent. `generated_id` is its id, where the caller gave none."""

    generation: pb.Generation
    retry_policy: RetryPolicy
    generated_id: str | None
    traceparent: str | None


class BaseStream:
    """The state of a stream."""

    def __init__(self, resumable: ResumableStream, generated_id: str | None, traceparent: str | None) -> None:
        self._resumable = resumable
        self._generated_id = generated_id
        self._traceparent = traceparent
        self._is_read = False
        self._is_closed = False

    @property
    def acceptance(self) -> Acceptance | None:
        """Id, model and seed; None before the first chunk."""
        return self._resumable.acceptance

    @property
    def prompt(self) -> ReturnedPrompt | None:
        """The prompt, with echo or prompt_logprobs; None before the first chunk."""
        return self._resumable.prompt

    @property
    def usage(self) -> Usage | None:
        """Tokens processed; None before the end."""
        return self._resumable.usage

    @property
    def num_resumes(self) -> int:
        """How often the request was resumed, or sent again."""
        return self._resumable.num_resumes

    def _begin_reading(self) -> None:
        if self._is_read or self._is_closed:
            raise RuntimeError("a stream is read once")
        self._is_read = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed("the stream") from None


StreamT = TypeVar("StreamT", bound=BaseStream)


class BaseClient(ABC, Generic[StreamT]):
    """The calls that open streams, and the policy of retries."""

    def __init__(
        self, connection: Connection, endpoint_list: EndpointList, resume: bool, resume_patience: float
    ) -> None:
        self._connection = connection
        self._endpoint_list = endpoint_list
        self._resume = resume
        self._resume_patience = resume_patience

    def stream(self, prompt: Prompt, **options: Unpack[CallOptions]) -> StreamT:
        """Continues text or token ids, and yields text as it comes."""
        return self._stream(self._completion_call(prompt, options))

    def stream_chat(self, messages: Messages, **options: Unpack[CallOptions]) -> StreamT:
        """Answers a chat, and yields text as it comes."""
        return self._stream(self._chat_call(messages, options))

    def resume(
        self,
        request_id: str,
        positions: Mapping[int, int] | None = None,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        on_resume: OnResume | None = None,
    ) -> StreamT:
        """Yields the chunks of a request that runs, or ended within the hour: all of them, or those after `positions`.

        `positions` is how far sequences were read already: index to offset of the next token. Raises QuireError
        REQUEST_UNKNOWN where there is no such request.
        """
        request = requests.resume_request(request_id, positions or {})
        resumable = ResumableStream(request, self._retry_policy(timeout, self._resume_patience, on_resume), positions)
        return self._open_stream(resumable, None, traceparent)

    @abstractmethod
    def _open_stream(self, resumable: ResumableStream, generated_id: str | None, traceparent: str | None) -> StreamT:
        """A stream whose first call is made when it is read."""

    def _completion_call(self, prompt: Prompt, options: CallOptions) -> GenerationCall:
        generation_options, call_options = _split(options)
        return self._generation_call(requests.completion_request(prompt, generation_options), call_options)

    def _chat_call(self, messages: Messages, options: CallOptions) -> GenerationCall:
        generation_options, call_options = _split(options)
        return self._generation_call(requests.chat_request(messages, generation_options), call_options)

    def _generation_call(self, generation: pb.Generation, options: CallOptions) -> GenerationCall:
        resume = options.get("resume")
        resume_timeout = self._resume_patience if (self._resume if resume is None else resume) else None
        retry_policy = self._retry_policy(options.get("timeout"), resume_timeout, options.get("on_resume"))
        generated_id = None if resume_timeout is None else requests.assign_request_id(generation)
        return GenerationCall(generation, retry_policy, generated_id, options.get("traceparent"))

    def _retry_policy(
        self, timeout: float | None, resume_timeout: float | None = None, on_resume: OnResume | None = None
    ) -> RetryPolicy:
        return RetryPolicy(self._endpoint_list, self._connection.deadline(timeout), resume_timeout, on_resume)

    def _stream(self, call: GenerationCall) -> StreamT:
        resumable = ResumableStream(pb.StreamGenerateRequest(generation=call.generation), call.retry_policy)
        return self._open_stream(resumable, call.generated_id, call.traceparent)


_CALL_OPTIONS = CallOptions.__annotations__.keys() - GenerationOptions.__annotations__.keys()


def _split(options: CallOptions) -> tuple[GenerationOptions, CallOptions]:
    """Options of the request, unknown ones included, and those of the call."""
    generation_options: GenerationOptions = {}
    call_options: CallOptions = {}
    for name, value in options.items():
        target = call_options if name in _CALL_OPTIONS else generation_options
        target[name] = value  # type: ignore[literal-required]
    return generation_options, call_options
