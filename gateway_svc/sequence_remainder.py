"""The rest of a whole sequence, for a client that has its beginning."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from gateway_svc.detokenizer import SequenceText
from gateway_svc.output import Chunk, merge_chunks
from gateway_svc.rendering import Rendering
from gateway_svc.resume_position import ResumePosition
from gateway_svc.sequence_turn import sequence_turn
from gateway_svc.vocabulary import Vocabulary


def remainder(whole: Chunk, start: ResumePosition, vocabulary: Vocabulary, rendering: Rendering) -> list[Chunk]:
    """The rest of a sequence from `start` on, with its end, in chunks that fit a message. Raises QuireError where the
    sequence has fewer tokens."""
    num_tokens = len(whole.token_ids)
    if start.num_tokens > num_tokens:
        raise start.offset_error()
    if start.num_tokens == num_tokens:
        return [Chunk(whole.index, num_tokens, finish=whole.finish, score=whole.score)]
    begins = range(start.num_tokens, num_tokens, rendering.max_chunk_tokens(vocabulary))
    beginnings = [*_beginnings(whole, begins, vocabulary, rendering), whole]
    return [_between(whole, known, longer) for known, longer in pairwise(beginnings)]


def _beginnings(whole: Chunk, lengths: Iterable[int], vocabulary: Vocabulary, rendering: Rendering) -> Iterator[Chunk]:
    """The beginnings of a sequence that have so many tokens, without the end of it."""
    turn = sequence_turn(SequenceText(vocabulary, rendering), whole.index, vocabulary, rendering)
    known = Chunk(whole.index, 0)
    for length in lengths:
        for token_id in whole.token_ids[len(known.token_ids) : length]:
            known.token_ids.append(token_id)
            turn.push(token_id, known)
        yield merge_chunks([known])[0]


def _between(whole: Chunk, known: Chunk, longer: Chunk) -> Chunk:
    """What one beginning of a sequence lacks of a longer one."""
    begin, end = len(known.token_ids), len(longer.token_ids)
    known_calls = {call.index: call for call in known.tool_calls}
    calls = [call.after(known_calls.get(call.index)) for call in longer.tool_calls]
    return Chunk(
        whole.index,
        begin,
        longer.text[len(known.text) :],
        whole.token_ids[begin:end],
        whole.logprobs[begin:end],
        longer.finish,
        longer.score,
        longer.reasoning[len(known.reasoning) :],
        [call for call in calls if call.id or call.arguments],
        ended_calls=longer.ended_calls[len(known.ended_calls) :],
    )
