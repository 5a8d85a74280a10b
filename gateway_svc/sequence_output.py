"""The output of one sequence: the scheduler's tokens become chunks, from the client's position on."""

from gateway_svc import request_errors
from gateway_svc.detokenizer import SequenceText
from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob
from gateway_svc.rendering import Rendering
from gateway_svc.resume_position import EndDelivery, ResumePosition
from gateway_svc.sequence_turn import sequence_turn
from gateway_svc.validated_request import StopText
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2


class SequenceOutput:
    """A sequence's tokens, text and end, and the part of them that was not popped yet."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        rendering: Rendering,
        start: ResumePosition,
        *,
        chunk_per_token: bool = False,
    ) -> None:
        """The first chunk begins at token `start`, once the sequence has that many tokens.

        With `chunk_per_token` there is a chunk for each token, and one for the end: a function of the tokens alone.
        Otherwise there is one for all that was not popped, or several where these tokens may not fit a message.
        """
        self.index = index
        self.num_tokens = 0
        self.num_acknowledged = 0
        self.cached_tokens = 0
        self.last_time: float | None = None
        self.finish: Finish | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        keeps_places = chunk_per_token and rendering.logprobs is not None
        self._text = SequenceText(vocabulary, rendering, keeps_places=keeps_places)
        self._turn = sequence_turn(self._text, index, vocabulary, rendering)
        self._start = start
        self._has_logprobs = rendering.has_logprobs
        self._num_top = rendering.logprobs or 0
        self._requested = rendering.logprob_token_ids
        self._omits_output = rendering.omits_output
        self._includes_stop = rendering.stop_text is StopText.INCLUDED
        self._max_chunk_tokens = 1 if chunk_per_token else rendering.max_chunk_tokens(vocabulary)
        self._chunk_per_token = chunk_per_token
        self._pending: list[Chunk] = []

    def extend(self, tokens: scheduler_pb2.Tokens) -> None:
        """Appends tokens, except those that are here already.

        Raises ValueError where tokens are missing, and QuireError where the sequence ends before its start, or has a
        value and no tokens.
        """
        num_known = self.num_tokens - tokens.offset
        if num_known < 0:
            raise ValueError("tokens are missing")
        if tokens.HasField("cached_tokens"):
            self.cached_tokens = tokens.cached_tokens
        cause = tokens.end.WhichOneof("cause") if tokens.HasField("end") else None
        token_ids = tokens.token_ids
        num_tokens = len(token_ids)
        # The token that ends a sequence counts, and has no text unless the client asks for that.
        num_with_text = num_tokens - 1 if cause == "stop_token_id" and not self._includes_stop else num_tokens
        logprobs = tokens.logprobs if self._has_logprobs else ()
        for at in range(num_known, num_tokens):
            token_id = token_ids[at]
            chunk = self._append(token_id, logprobs[at] if logprobs else None)
            if at < num_with_text and not self._omits_output:
                self._turn.push(token_id, chunk)
            if self._text.matched is not None:
                self._end(Finish(FinishReason.STOP, self._text.matched))
                return
        if cause is not None:
            self._end_with_cause(cause, tokens)

    @property
    def num_sent_tokens(self) -> int:
        """The number of tokens that are the client's."""
        return 0 if self._omits_output else self.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens are reasoning."""
        return self._turn.num_reasoning_tokens

    def check(self, tokens: scheduler_pb2.Tokens) -> None:
        """Raises ValueError where tokens differ from those that are here."""
        here = self._token_ids[tokens.offset :]
        if any(ours != theirs for ours, theirs in zip(here, tokens.token_ids, strict=False)):
            raise ValueError("tokens that were sent have changed")

    def unflushed(self, offset: int) -> scheduler_pb2.UnflushedTokens | None:
        """The tokens from an offset on, for a scheduler; None where there are none."""
        is_truncated = self.finish is not None and isinstance(self.finish.matched, str)
        offset = min(offset, self.num_tokens)
        if offset == self.num_tokens and not is_truncated:
            return None
        return scheduler_pb2.UnflushedTokens(
            index=self.index,
            offset=offset,
            token_ids=self._token_ids[offset:],
            logprobs=[logprob.to_worker_proto() for logprob in self._logprobs[offset:]],
            is_truncated=is_truncated,
        )

    def pop_pending(self) -> list[Chunk]:
        """The output since the previous call, if there is any."""
        chunks, self._pending = self._pending, []
        return chunks

    def _append(self, token_id: int, logprobs: worker_pb2.TokenLogprobs | None) -> Chunk | None:
        """Appends a token, without its text. Returns the chunk that it is in; None: the client has it, or gets none."""
        chunk = self._chunk_of_next_token()
        self._token_ids.append(token_id)
        self.num_tokens += 1
        if chunk is not None:
            chunk.token_ids.append(token_id)
        if logprobs is not None:
            logprob = TokenLogprob.from_proto(token_id, logprobs, self._num_top, self._text.num_chars, self._requested)
            self._logprobs.append(logprob)
            if chunk is not None:
                chunk.logprobs.append(logprob)
        return chunk

    def _chunk_of_next_token(self) -> Chunk | None:
        if self._omits_output or self.num_tokens < self._start.num_tokens:
            return None
        if self._start.ending is EndDelivery.GIVEN:
            raise self._start.offset_error()
        latest = self._pending[-1] if self._pending else None
        if latest is None or self._chunk_per_token or len(latest.token_ids) >= self._max_chunk_tokens:
            return self._new_chunk()
        return latest

    def _chunk_of_end(self) -> Chunk:
        """That of the last token, also where it is full: a client that has the token has the text that was held back,
        too. With `chunk_per_token` one of its own."""
        return self._pending[-1] if self._pending and not self._chunk_per_token else self._new_chunk()

    def _new_chunk(self) -> Chunk:
        self._pending.append(Chunk(self.index, self.num_sent_tokens))
        return self._pending[-1]

    def _end_with_cause(self, cause: str, tokens: scheduler_pb2.Tokens) -> None:
        if self._omits_output:
            cause = "length"
        match cause:
            case "stop_token_id":
                self._end(Finish(FinishReason.STOP, tokens.end.stop_token_id))
            case "length":
                self._end(Finish(FinishReason.LENGTH))
            case "value":  # only a call of another kind can have submitted it
                raise request_errors.unknown()
            case _:
                raise ValueError("no stop string is where the sequence was truncated")
        if self._pending and tokens.HasField("score"):
            self._pending[-1].score = tokens.score

    def _end(self, finish: Finish) -> None:
        if self.num_sent_tokens < self._start.num_tokens:
            raise self._start.offset_error()
        ending = self._start.ending if self.num_sent_tokens == self._start.num_tokens else EndDelivery.MISSING
        last = self._chunk_of_end() if ending is EndDelivery.MISSING else None
        # Text that was held back may be a call, so the reason to finish is known after it.
        matched = finish.matched
        self._turn.end(last, matched if isinstance(matched, int) and not self._includes_stop else None)
        if self._turn.is_calling and finish.reason is FinishReason.STOP:
            finish = Finish(FinishReason.TOOL_CALLS, finish.matched)
        self.finish = finish
        if ending is not EndDelivery.GIVEN:
            (last or self._chunk_of_end()).finish = finish
