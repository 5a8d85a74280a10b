"""The output of one sequence from any position of the client."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway_svc.output import Chunk, Finish, FinishReason, merge_chunks
from gateway_svc.ranking import completed_sequences
from gateway_svc.rendering import Rendering
from gateway_svc.resume_position import EndDelivery, ResumePosition
from gateway_svc.sequence_output import SequenceOutput
from gateway_svc.sequence_remainder import remainder
from gateway_svc.validated_request import BeamSearchParams, EarlyStopping, SpecialTokens, StopText
from gateway_values import id_of, make_rendering, vocabulary_of
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import cut_end, length_end, stop_end, value_end
from svc_common.errors import QuireError, Reason
from tiny_model import EOS, tiny_tokenizer

TINY = tiny_tokenizer()
VOCABULARY = vocabulary_of(TINY)
HELLO = TINY.encode("hello").ids

# Bytes that form complete and incomplete characters of two to four bytes, a few letters, and special tokens.
FRAGMENTS = [*TINY.encode("aß你😀").ids, *HELLO, id_of(TINY, "łå"), 0, 1, EOS]

renderings = st.builds(
    lambda stop, min_tokens, include, kept, prompt: make_rendering(
        VOCABULARY,
        stop=tuple(stop),
        min_tokens=min_tokens,
        stop_text=StopText.INCLUDED if include else StopText.EXCLUDED,
        special_tokens=SpecialTokens.KEPT if kept else SpecialTokens.HIDDEN,
        prompt_token_ids=prompt,
    ),
    st.lists(st.text("aß你😀helo\ufffd", min_size=1, max_size=4), max_size=3, unique=True),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6),
)


def steps(token_ids: list[int], sizes: list[int], end: scheduler_v1.SequenceEnd) -> list[scheduler_v1.Tokens]:
    """The tokens of a sequence, several per message; the last message has the end."""
    tokens, offset = [], 0
    for size in [*sizes, len(token_ids)]:
        piece = token_ids[offset : offset + size]
        if piece:
            tokens.append(scheduler_v1.Tokens(offset=offset, token_ids=piece))
            offset += len(piece)
    tokens[-1].end.CopyFrom(end)
    return tokens


_START = ResumePosition()


def given_out(rendering: Rendering, tokens: list[scheduler_v1.Tokens], start: ResumePosition = _START) -> list[Chunk]:
    """The chunks of a sequence, one for each step."""
    sequence = SequenceOutput(0, VOCABULARY, rendering, start)
    chunks: list[Chunk] = []
    for one in tokens:
        if sequence.finish is None:
            sequence.extend(one)
            chunks += sequence.pop_pending()
    return chunks


@given(
    rendering=renderings,
    output=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=25),
    sizes=st.lists(st.integers(1, 4), max_size=25),
    is_stopped=st.booleans(),
    kept_alive=st.booleans(),
)
@example(
    rendering=make_rendering(VOCABULARY, stop=("llo",)),
    output=[*TINY.encode("hel").ids, EOS],
    sizes=[1, 1, 1, 1],
    is_stopped=True,
    kept_alive=False,
)
def test_what_is_given_from_any_token_on_is_the_rest_of_the_whole(
    rendering: Rendering, output: list[int], sizes: list[int], is_stopped: bool, kept_alive: bool
) -> None:
    end = stop_end(output[-1]) if is_stopped else length_end()
    tokens = steps(output, sizes, end)
    (whole,) = merge_chunks(given_out(rendering, tokens))
    num_tokens = len(whole.token_ids)
    record = tokens if kept_alive else [scheduler_v1.Tokens(token_ids=whole.token_ids, end=end)]
    if not kept_alive and isinstance(whole.finish, Finish) and isinstance(whole.finish.matched, str):
        record[0].end.CopyFrom(cut_end())
    before = [ResumePosition(offset, EndDelivery.UNKNOWN, "where") for offset in range(num_tokens + 1)]
    for start in before:
        (rest,) = merge_chunks(given_out(rendering, record, start))
        assert rest.offset == start.num_tokens
        assert rest.token_ids == whole.token_ids[start.num_tokens :]
        assert whole.text.endswith(rest.text)
        assert rest.finish == whole.finish
        assert [rest] == remainder(whole, start, VOCABULARY, rendering)
        # The text before the position and the text after it are the whole text.
        given_before = text_before(rendering, output, start.num_tokens, whole)
        assert given_before + rest.text == whole.text
    with pytest.raises(QuireError) as beyond:
        given_out(rendering, record, ResumePosition(num_tokens + 1, EndDelivery.UNKNOWN, "where"))
    assert (beyond.value.reason, beyond.value.field) == (Reason.RESUME_OFFSET_INVALID, "where")


def text_before(rendering: Rendering, output: list[int], num_tokens: int, whole: Chunk) -> str:
    """The output of a stream after this many tokens; with all of them, its end."""
    if num_tokens == len(whole.token_ids):
        return whole.text
    if num_tokens == 0:
        return ""
    chunks = given_out(rendering, [scheduler_v1.Tokens(token_ids=output[:num_tokens])])
    return "".join(chunk.text for chunk in chunks)


def ended(*token_ids: int) -> list[scheduler_v1.Tokens]:
    return [scheduler_v1.Tokens(token_ids=token_ids, end=length_end())]


@pytest.mark.parametrize(
    ("stop_text", "special_tokens", "texts"),
    [
        (StopText.EXCLUDED, SpecialTokens.HIDDEN, ("hell", "hello")),
        (StopText.EXCLUDED, SpecialTokens.KEPT, ("hell", "hello")),
        (StopText.INCLUDED, SpecialTokens.HIDDEN, ("hello", "hello")),
        (StopText.INCLUDED, SpecialTokens.KEPT, ("hello", "hello<|im_end|>")),
    ],
)
def test_the_text_of_the_token_that_ends_a_sequence_is_returned_on_request(
    stop_text: StopText, special_tokens: SpecialTokens, texts: tuple[str, str]
) -> None:
    rendering = make_rendering(VOCABULARY, stop_text=stop_text, special_tokens=special_tokens)
    letters = [id_of(TINY, letter) for letter in "hello"]
    for token_ids, text in zip((letters, [*letters, EOS]), texts, strict=True):
        (chunk,) = given_out(rendering, [scheduler_v1.Tokens(token_ids=token_ids, end=stop_end(token_ids[-1]))])
        assert (chunk.text, chunk.token_ids) == (text, token_ids)


def test_an_end_is_sent_again_where_its_delivery_is_unknown() -> None:
    (chunk,) = given_out(make_rendering(), ended(*HELLO), ResumePosition(len(HELLO), EndDelivery.UNKNOWN))
    assert chunk == Chunk(0, len(HELLO), finish=Finish(FinishReason.LENGTH))


def test_an_end_that_was_received_is_not_sent_again() -> None:
    assert given_out(make_rendering(), ended(*HELLO), ResumePosition(len(HELLO), EndDelivery.GIVEN)) == []


def test_a_missing_end_is_sent_with_the_text_that_was_held_back() -> None:
    first = TINY.encode("😀").ids[0]
    (chunk,) = given_out(make_rendering(), ended(first), ResumePosition(1, EndDelivery.MISSING))
    assert (chunk.text, chunk.token_ids) == ("\ufffd", [])


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_an_end_that_was_given_elsewhere_is_refused(num_tokens: int) -> None:
    with pytest.raises(QuireError):
        given_out(make_rendering(), ended(5, 6), ResumePosition(num_tokens, EndDelivery.GIVEN))


def test_text_that_was_held_back_is_sent_with_the_last_token_of_a_full_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = make_rendering(VOCABULARY, stop=("lox",))
    monkeypatch.setattr("gateway_svc.rendering._CHUNK_BYTES", 1)  # one token in each
    chunks = given_out(rendering, ended(*(id_of(TINY, letter) for letter in "hello")))
    assert [chunk.text for chunk in chunks] == ["h", "e", "", "l", "lo"]
    assert [chunk.finish for chunk in chunks] == [None] * 4 + [Finish(FinishReason.LENGTH)]


def test_a_sequence_that_is_not_there_yet_is_waited_for() -> None:
    tokens = [scheduler_v1.Tokens(offset=offset, token_ids=HELLO) for offset in range(3)]
    (chunk,) = given_out(make_rendering(), tokens, ResumePosition(2))
    assert (chunk.offset, chunk.token_ids) == (2, HELLO)


def test_tokens_that_are_here_make_no_chunk() -> None:
    tokens = [scheduler_v1.Tokens(token_ids=HELLO), scheduler_v1.Tokens(token_ids=HELLO)]
    assert len(given_out(make_rendering(), tokens)) == 1


def test_tokens_that_are_missing_are_a_fault() -> None:
    with pytest.raises(ValueError, match="missing"):
        given_out(make_rendering(), [scheduler_v1.Tokens(offset=1, token_ids=HELLO)])


def test_a_cut_where_no_stop_string_is_is_a_fault() -> None:
    with pytest.raises(ValueError, match="stop string"):
        given_out(make_rendering(), [scheduler_v1.Tokens(token_ids=HELLO, end=cut_end())])


def test_tokens_that_changed_are_a_fault() -> None:
    sequence = SequenceOutput(0, VOCABULARY, make_rendering(), ResumePosition())
    sequence.extend(scheduler_v1.Tokens(token_ids=[5, 6]))
    for same in ([5], [5, 6], [5, 6, 7], []):
        sequence.check(scheduler_v1.Tokens(token_ids=same))
    with pytest.raises(ValueError, match="changed"):
        sequence.check(scheduler_v1.Tokens(token_ids=[5, 7]))


def test_a_tail_is_what_lies_beyond_an_offset() -> None:
    sequence = SequenceOutput(1, VOCABULARY, make_rendering(logprobs=1), ResumePosition(1))
    top = [worker_v1.Logprob(token_id=9, logprob=-0.25)]
    logprobs = [worker_v1.TokenLogprobs(logprob=-place, top=top) for place in (1, 2)]
    sequence.extend(scheduler_v1.Tokens(index=1, token_ids=[5, 6], logprobs=logprobs))
    assert sequence.unflushed(1) == scheduler_v1.UnflushedTokens(
        index=1, offset=1, token_ids=[6], logprobs=logprobs[1:]
    )
    assert sequence.unflushed(0) == scheduler_v1.UnflushedTokens(index=1, token_ids=[5, 6], logprobs=logprobs)
    assert sequence.unflushed(2) is None


def test_unflushed_tokens_end_at_a_stop_string() -> None:
    sequence = SequenceOutput(0, VOCABULARY, make_rendering(stop=("b",)), ResumePosition())
    sequence.extend(scheduler_v1.Tokens(token_ids=TINY.encode("abc").ids))
    assert sequence.unflushed(1) == scheduler_v1.UnflushedTokens(
        offset=1, token_ids=TINY.encode("b").ids, is_truncated=True
    )
    assert sequence.unflushed(3) == scheduler_v1.UnflushedTokens(offset=2, is_truncated=True)


def test_beams_lose_what_only_their_search_needed() -> None:
    search = BeamSearchParams(3, 1.0, EarlyStopping.HEURISTIC)
    top = [worker_v1.Logprob(token_id=token_id, logprob=-1.0) for token_id in (5, 6, 7)]
    logprobs = [worker_v1.TokenLogprobs(logprob=-1.0, top=top)]
    tokens = [scheduler_v1.Tokens(token_ids=[5], logprobs=logprobs, end=length_end(), score=-1.0)]
    for asked, expected in ((None, []), (1, [((5, -1.0),)])):
        rendering = make_rendering(beam_search=search, logprobs=asked)
        (beam,) = completed_sequences(given_out(rendering, tokens), rendering)
        assert (beam.score, [one.top for one in beam.logprobs]) == (-1.0, expected)


def test_a_request_with_a_value_has_no_output_to_resume() -> None:
    sequence = SequenceOutput(0, VOCABULARY, make_rendering(), ResumePosition())
    with pytest.raises(QuireError) as error:
        sequence.extend(scheduler_v1.Tokens(end=value_end(0.5)))
    assert error.value.reason is Reason.REQUEST_UNKNOWN


def test_chunks_name_the_tokens_of_their_text() -> None:
    rendering = make_rendering(VOCABULARY, logprobs=0, stop=("b!",))
    sequence = SequenceOutput(0, VOCABULARY, rendering, ResumePosition(), chunk_per_token=True)
    token_ids = [*TINY.encode("a😀").ids, 1, *TINY.encode("b").ids, EOS]
    logprobs = [worker_v1.TokenLogprobs(logprob=-0.5)] * len(token_ids)
    sequence.extend(scheduler_v1.Tokens(token_ids=token_ids, logprobs=logprobs, end=stop_end(EOS)))
    named = {chunk.text: chunk.text_tokens for chunk in sequence.pop_pending() if chunk.text or chunk.text_tokens}
    # A character of four bytes; a hidden token; a letter that might have begun a stop string, before the end.
    assert named == {"a": (0,), "😀": (1, 2, 3, 4), "b": (6,)}


@pytest.mark.parametrize("logprobs", [None, 2])
def test_merged_chunks_are_bounded(logprobs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slow client, or one that resumes, gets at once is several chunks where one may not fit a message."""
    rendering = make_rendering(VOCABULARY, logprobs=logprobs, special_tokens=SpecialTokens.KEPT)
    monkeypatch.setattr("gateway_svc.rendering._CHUNK_BYTES", 3_000)
    most = rendering.max_chunk_tokens(VOCABULARY)
    longest = id_of(TINY, "<|endoftext|>")
    token_ids = [*HELLO, *([longest] * 100), *TINY.encode("😀").ids]
    top = [worker_v1.Logprob(token_id=longest, logprob=-0.5)] * 2
    tokens = scheduler_v1.Tokens(token_ids=token_ids, end=length_end())
    tokens.logprobs.extend([worker_v1.TokenLogprobs(logprob=-0.5, top=top)] * len(token_ids))
    chunks = given_out(rendering, [tokens])
    assert max(len(chunk.token_ids) for chunk in chunks) == most < 100
    assert max(chunk.to_proto(VOCABULARY).ByteSize() for chunk in chunks) <= 3_000
    assert [chunk.offset for chunk in chunks] == list(range(0, len(token_ids), most))
    (whole,) = merge_chunks(chunks)
    assert whole.text == TINY.decode(token_ids, skip_special_tokens=False)
    assert (whole.token_ids, whole.finish) == (token_ids, Finish(FinishReason.LENGTH))
    # From any chunk on, the rest is the same; also of a sequence that is known as a whole.
    for place, chunk in enumerate(chunks):
        start = ResumePosition(chunk.offset)
        assert given_out(rendering, [tokens], start) == chunks[place:]
        assert remainder(whole, start, VOCABULARY, rendering) == chunks[place:]
