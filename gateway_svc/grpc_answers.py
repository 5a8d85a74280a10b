"""Messages of the public contract that answer gRPC calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from gateway_svc.field_paths import Field, generation_field_path
from gateway_svc.output import Chunk
from gateway_svc.ranking import completed_sequences
from gateway_svc.rendering import Rendering
from gateway_svc.resume_position import ResumePosition
from gateway_svc.running_request import RunningRequest
from gateway_svc.sequence_remainder import remainder
from gateway_svc.value_inputs import Vector
from gateway_svc.vocabulary import Vocabulary
from quire.inference.v1 import inference_pb2
from svc_common.errors import QuireError, Reason
from svc_common.server import PUBLIC_MESSAGE_BYTES

V = TypeVar("V", inference_pb2.EmbedResponse, inference_pb2.ClassifyResponse)
ChunkResponse = TypeVar("ChunkResponse", inference_pb2.StreamGenerateResponse, inference_pb2.ResumeResponse)

_USAGE_BYTES = 64  # of an answer's usage, at most
_LEAST_LOGPROB_BYTES = 10  # of a log-probability in an answer


def chunk_response(kind: Callable[[], ChunkResponse], vocabulary: Vocabulary, chunk: Chunk) -> ChunkResponse:
    response = kind()
    chunk.write_to(response.chunk, vocabulary)
    return response


def returned_prompt(running: RunningRequest) -> inference_pb2.Prompt | None:
    prompt = running.prompt
    return None if prompt is None else prompt.to_proto(running.vocabulary)


def acceptance(running: RunningRequest) -> inference_pb2.Acceptance:
    rendering = running.rendering
    return inference_pb2.Acceptance(
        request_id=rendering.request_id, model=rendering.model, seed=rendering.seed, is_durable=running.is_durable
    )


def whole_answer(running: RunningRequest, chunks: Sequence[Chunk]) -> inference_pb2.GenerateResponse:
    """The answer. Raises QuireError if grpc would not send it."""
    answer = inference_pb2.GenerateResponse(
        acceptance=acceptance(running),
        completions=[
            whole.to_completion(running.vocabulary) for whole in completed_sequences(chunks, running.rendering)
        ],
        usage=running.usage.to_proto(),
        prompt=returned_prompt(running),
    )
    _check_size(answer.ByteSize(), running.rendering)
    return answer


def check_least_size(running: RunningRequest) -> None:
    """Raises QuireError where the answer, with what there is of it, is already too large for grpc to send."""
    # Which tokens an answer with best_of has is known at its end.
    if not running.rendering.is_best_of:
        _check_size(running.num_logprobs * _LEAST_LOGPROB_BYTES, running.rendering)


def _check_size(size: int, rendering: Rendering) -> None:
    """Raises QuireError for an answer of so many bytes that grpc would not send it."""
    if size > PUBLIC_MESSAGE_BYTES:
        of_prompt = Field.MAX_TOKENS if rendering.prompt_logprobs is None else Field.PROMPT_LOGPROBS
        which = of_prompt if rendering.logprobs is None else Field.LOGPROBS
        message = (
            f"the answer has more than {PUBLIC_MESSAGE_BYTES} bytes: ask for fewer, call StreamGenerate, or read the "
            "output of a request with a request_id by Resume"
        )
        raise QuireError(Reason.MESSAGE_TOO_LARGE, message, field=generation_field_path(which))


def missing_chunks(
    chunks: Sequence[Chunk],
    resume_positions: Mapping[int, ResumePosition],
    rendering: Rendering,
    vocabulary: Vocabulary,
) -> list[tuple[int, Chunk]]:
    """The rest of each ranked sequence for a client at these positions."""
    ranked = completed_sequences(chunks, rendering)
    starts = [resume_positions.get(whole.index, ResumePosition()) for whole in ranked]
    return [
        (0, chunk)
        for whole, start in zip(ranked, starts, strict=True)
        for chunk in remainder(whole, start, vocabulary, rendering)
    ]


def embedded(model: str, vectors: Sequence[Vector]) -> inference_pb2.EmbedResponse:
    return _fitting(
        inference_pb2.EmbedResponse(
            model=model, embeddings=[inference_pb2.Embedding(numbers=vector) for vector in vectors]
        )
    )


def classified(model: str, labels: Sequence[str], values: Sequence[Vector]) -> inference_pb2.ClassifyResponse:
    return _fitting(
        inference_pb2.ClassifyResponse(
            model=model,
            labels=labels,
            classifications=[inference_pb2.Classification(scores=value) for value in values],
        )
    )


def _fitting(answer: V) -> V:
    """The answer to a call with inputs. Raises QuireError if grpc would not send it."""
    if (size := answer.ByteSize() + _USAGE_BYTES) > PUBLIC_MESSAGE_BYTES:
        message = f"the answer to so many has {size} bytes, and may have {PUBLIC_MESSAGE_BYTES}: send fewer in a call"
        raise QuireError(Reason.MESSAGE_TOO_LARGE, message, field="inputs")
    return answer
