"""The outputs of one request with what is new in each."""

from dataclasses import dataclass, field, replace

from gateway_svc.output import Chunk, ToolCallDelta, merge_calls, merge_chunks
from quire_offline.offline_request import OfflineRequest
from quire_offline.outputs import CompletionOutput, RequestOutput


@dataclass(slots=True)
class _Sequence:
    """What outputs have of a sequence beside what is new."""

    cumulative_logprob: float = 0.0
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    is_finished: bool = False


class Deltas:
    """Each output is made of the chunks since the one before it, so that all of them take time that is linear in their
    length. Calls of tools come whole, at their sequence's end, and `cumulative_logprob` is the sum so far.
    """

    def __init__(self, request: OfflineRequest) -> None:
        self._request = request
        self._num_chunks = 0
        self._has_prompt = False
        """Whether an output had the log-probabilities of the prompt."""
        self._sequences: dict[int, _Sequence] = {}

    def next(self, *, finished: bool) -> RequestOutput:
        """What is new. Sequences without anything new are left out."""
        request = self._request
        if request.running is None or request.is_ranked:  # all of it comes at the end
            return request.output(finished=finished)
        new = request.chunks[self._num_chunks :]  # another thread appends
        self._num_chunks += len(new)
        ends = finished and request.was_aborted
        if ends:
            new += (Chunk(index, 0) for index in range(request.num_sequences) if not self._sequence(index).is_finished)
        outputs = [self._completion(chunk, ends=ends) for chunk in merge_chunks(new)]
        output = request.with_outputs(outputs, finished=finished, has_prompt=not self._has_prompt)
        self._has_prompt |= output.prompt_logprobs is not None
        return output

    def _completion(self, chunk: Chunk, *, ends: bool) -> CompletionOutput:
        sequence = self._sequence(chunk.index)
        sequence.tool_calls += chunk.tool_calls
        sequence.is_finished = chunk.finish is not None or ends
        calls = merge_calls(sequence.tool_calls) if sequence.is_finished else []
        output = self._request.completion(replace(chunk, tool_calls=calls), ends=ends)
        if output.cumulative_logprob is None:
            return output
        sequence.cumulative_logprob += output.cumulative_logprob
        return replace(output, cumulative_logprob=sequence.cumulative_logprob)

    def _sequence(self, index: int) -> _Sequence:
        return self._sequences.setdefault(index, _Sequence())
