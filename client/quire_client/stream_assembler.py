"""Checks that each token of a stream comes once, and assembles chunks into whole sequences."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client.errors import BROKEN_STREAM, QuireError
from quire_client.results import (
    Acceptance,
    Chunk,
    Completion,
    Generation,
    ReturnedPrompt,
    ToolCall,
    ToolCallDelta,
    Usage,
)


class StreamAssembler:
    """Reads the messages of one stream in their order. Acceptance comes first, usage last.

    Where a stream is resumed, its messages follow those that came before. `positions` is how far sequences were read
    before: index to offset of the next token.
    """

    def __init__(self, positions: Mapping[int, int] | None = None) -> None:
        self.acceptance: Acceptance | None = None
        self.prompt: ReturnedPrompt | None = None
        self.usage: Usage | None = None
        self._next_offsets: defaultdict[int, int] = defaultdict(int, positions or {})
        self._ended: set[int] = set()

    @property
    def positions(self) -> Mapping[int, int]:
        """How far each sequence was read: index to offset of the next token."""
        return self._next_offsets

    def read(self, message: pb.StreamGenerateResponse | pb.ResumeResponse) -> Chunk | None:
        """Takes the next message; returns its chunk, where it carries a new one.

        Raises QuireError where tokens are missing or come twice, or the acceptance is of another request.
        """
        match message.WhichOneof("event"):
            case "acceptance":
                self._accept(Acceptance.from_proto(message.acceptance))
            case "prompt":
                self.prompt = ReturnedPrompt.from_proto(message.prompt)
            case "usage":
                self.usage = Usage.from_proto(message.usage)
            case "chunk":
                chunk = Chunk.from_proto(message.chunk)
                if chunk.token_ids and (chunk.offset != self._next_offsets[chunk.index] or chunk.index in self._ended):
                    raise self._broken("tokens of the stream are missing or came twice")
                if chunk.index in self._ended:
                    return None  # a server does not know that the end was read, and sends it again
                self._next_offsets[chunk.index] += len(chunk.token_ids)
                if chunk.finish is not None:
                    self._ended.add(chunk.index)
                return chunk
        return None

    def check_complete(self) -> tuple[Acceptance, Usage]:
        """Acceptance and usage. Raises QuireError where the stream ended before its last message."""
        if self.acceptance is None or self.usage is None:
            raise self._broken("the stream ended early")
        return self.acceptance, self.usage

    def assemble(self, chunks: Iterable[Chunk]) -> Generation:
        """The whole generation, from all chunks of the stream. Raises QuireError where it is incomplete."""
        acceptance, usage = self.check_complete()
        by_index: defaultdict[int, list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            by_index[chunk.index].append(chunk)
        completions = []
        for index, pieces in sorted(by_index.items()):
            finish = pieces[-1].finish
            if finish is None:
                raise self._broken(f"sequence {index} has no end")
            completions.append(
                Completion(
                    index=index,
                    text="".join(piece.text for piece in pieces),
                    token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
                    logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
                    finish=finish,
                    reasoning="".join(piece.reasoning for piece in pieces),
                    tool_calls=_joined(delta for piece in pieces for delta in piece.tool_calls),
                )
            )
        return Generation(acceptance, tuple(completions), usage, self.prompt)

    def _accept(self, acceptance: Acceptance) -> None:
        known = self.acceptance
        if known is not None and known.identity != acceptance.identity:
            raise self._broken("another request has this name")
        self.acceptance = acceptance

    def _broken(self, message: str) -> QuireError:
        request_id = self.acceptance.request_id if self.acceptance else None
        return QuireError(grpc.StatusCode.DATA_LOSS, BROKEN_STREAM, message, request_id=request_id)


def _joined(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls of a sequence, from all their pieces."""
    by_index: defaultdict[int, list[ToolCallDelta]] = defaultdict(list)
    for delta in deltas:
        by_index[delta.index].append(delta)
    return tuple(ToolCallDelta.join(pieces) for _, pieces in sorted(by_index.items()))
