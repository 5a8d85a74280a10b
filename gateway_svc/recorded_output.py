"""The output of a request that a look-up found, without a subscription to it."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway_svc import request_errors
from gateway_svc.field_paths import contract_field_path
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.output import Chunk, Usage
from gateway_svc.rendering import Rendering
from gateway_svc.resume_position import ResumePosition
from gateway_svc.sequence_output import SequenceOutput
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError, Reason


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """What the request has so far. `chunks` are those of single tokens, of all its sequences. `stop_matches` are where
    stop strings ended sequences, in tokens, by index."""

    chunks: list[Chunk]
    usage: Usage
    vocabulary: Vocabulary
    failure: QuireError | None
    stop_matches: Mapping[int, int]

    @classmethod
    def of(cls, record: scheduler_pb2.Record, catalog: ModelCatalog) -> "RecordedOutput":
        """Raises QuireError where this gateway does not have the model or its tokenizer."""
        rendering = Rendering.from_proto(record.attached)
        model = catalog.get(rendering.model)
        if model is None or rendering.tokenizer_fingerprint not in (b"", model.tokenizer_fingerprint):
            raise request_errors.model_missing(rendering.model)
        vocabulary = model.tokenizer.vocabulary
        chunks: list[Chunk] = []
        stop_matches: dict[int, int] = {}
        num_tokens, cached_tokens, reasoning_tokens = 0, 0, 0
        for tokens in record.attached.sequences:
            output = SequenceOutput(tokens.index, vocabulary, rendering, ResumePosition(), chunk_per_token=True)
            output.extend(tokens)
            chunks += output.pop_pending()
            if output.finish is not None and isinstance(output.finish.matched, str):
                stop_matches[tokens.index] = output.num_tokens
            num_tokens += output.num_tokens
            cached_tokens = cached_tokens or output.cached_tokens
            reasoning_tokens += output.num_reasoning_tokens
        usage = Usage(rendering.prompt_length, num_tokens, cached_tokens, reasoning_tokens)
        # What ended the request after its last stop string has not ended its output.
        has_failed = record.HasField("failed") and len(stop_matches) < rendering.num_sequences
        failure = _failure_of(record.failed) if has_failed else None
        return cls(chunks, usage, vocabulary, failure, stop_matches)


def _failure_of(failed: scheduler_pb2.Failed) -> QuireError:
    if failed.reason == scheduler_pb2.FAILURE_REASON_INTERNAL:  # the log has it from the time when it happened
        return QuireError(Reason.INTERNAL, "an internal error has ended the request")
    return request_errors.error_from_failed(failed, contract_field_path, "")
