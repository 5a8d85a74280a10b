"""What a stream has said so far: checks that no token is missing, and folds chunks into whole sequences."""

from collections import defaultdict
from collections.abc import Iterable

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client.errors import BROKEN_STREAM, QuireError
from quire_client.results import Acceptance, Chunk, Completion, Generation, Usage


class Transcript:
    """Reads the messages of one stream in their order. Acceptance comes first, usage last."""

    def __init__(self) -> None:
        self.acceptance: Acceptance | None = None
        self.usage: Usage | None = None
        self._next_offsets: defaultdict[int, int] = defaultdict(int)

    def read(self, message: pb.StreamGenerateResponse) -> Chunk | None:
        """Takes the next message; returns its chunk, where it carries one. Raises QuireError at a gap."""
        match message.WhichOneof("event"):
            case "acceptance":
                self.acceptance = Acceptance.from_proto(message.acceptance)
            case "usage":
                self.usage = Usage.from_proto(message.usage)
            case "chunk":
                chunk = Chunk.from_proto(message.chunk)
                if chunk.token_ids and chunk.offset != self._next_offsets[chunk.index]:
                    raise self._broken("the stream left tokens out")
                self._next_offsets[chunk.index] += len(chunk.token_ids)
                return chunk
        return None

    def check_complete(self) -> tuple[Acceptance, Usage]:
        """Acceptance and usage. Raises QuireError where the stream ended before its last message."""
        if self.acceptance is None or self.usage is None:
            raise self._broken("the stream ended early")
        return self.acceptance, self.usage

    def fold(self, chunks: Iterable[Chunk]) -> Generation:
        """The whole generation, from all chunks of the stream. Raises QuireError where it is not whole."""
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
                )
            )
        return Generation(acceptance, tuple(completions), usage)

    def _broken(self, message: str) -> QuireError:
        request_id = self.acceptance.request_id if self.acceptance else None
        return QuireError(grpc.StatusCode.DATA_LOSS, BROKEN_STREAM, message, request_id=request_id)
