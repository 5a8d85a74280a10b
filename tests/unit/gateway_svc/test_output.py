"""The output of a request."""

import time

from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob, ToolCallDelta, Usage, merge_chunks
from gateway_values import vocabulary_of
from quire.inference.v1 import inference_pb2 as api
from tiny_model import tiny_tokenizer

VOCABULARY = vocabulary_of(tiny_tokenizer())
END = Finish(FinishReason.STOP, "x")


def test_chunks_of_a_sequence_join_in_their_order() -> None:
    one, two = TokenLogprob(5, -1.0, (), 0), TokenLogprob(6, -2.0, (), 1)
    chunks = [
        Chunk(1, 0, "b", [7]),
        Chunk(0, 0, "a", [5], [one]),
        Chunk(1, 1, "", [8]),
        Chunk(0, 1, "c", [6], [two], END),
    ]
    assert merge_chunks(chunks) == [Chunk(0, 0, "ac", [5, 6], [one, two], END), Chunk(1, 0, "b", [7, 8])]


def test_chunks_join_in_time_linear_in_their_number() -> None:
    count, piece = 10_000, "some text " * 20
    texts = [Chunk(0, index, piece, [5], reasoning=piece) for index in range(count)]
    calls = [Chunk(1, index, tool_calls=[ToolCallDelta(0, piece)]) for index in range(count)]
    began = time.process_time()
    answer, call = merge_chunks([*texts, *calls])
    assert time.process_time() - began < 1  # a copy of the text for each token takes ten times as long
    assert answer == Chunk(0, 0, piece * count, [5] * count, reasoning=piece * count)
    assert call.tool_calls == [ToolCallDelta(0, piece * count)]


def test_an_end_has_its_match() -> None:
    assert END.to_proto() == api.Finish(reason=api.FINISH_REASON_STOP, stop="x")
    assert Finish(FinishReason.STOP, 0).to_proto() == api.Finish(reason=api.FINISH_REASON_STOP, token_id=0)
    assert Finish(FinishReason.LENGTH).to_proto() == api.Finish(reason=api.FINISH_REASON_LENGTH)


def test_a_chunk_of_a_running_sequence_has_no_end() -> None:
    chunk = Chunk(2, 7, "hi", [5]).to_proto(VOCABULARY)
    assert chunk == api.Chunk(index=2, offset=7, text="hi", token_ids=[5])
    assert not chunk.HasField("finish")


def test_usage_adds_up() -> None:
    assert sum([Usage(1, 2, 3), Usage(10, 20, 30)], Usage()) == Usage(11, 22, 33)


def test_a_call_has_arguments_or_the_text_that_a_custom_tool_takes() -> None:
    pieces = [
        ToolCallDelta(0, "", "call_1", "run", is_custom=True),
        ToolCallDelta(0, "1+", is_custom=True),
        ToolCallDelta(1, "{}", "call_2", "f"),
    ]
    chunk = Chunk(0, 0, tool_calls=pieces)
    assert list(chunk.to_proto(VOCABULARY).tool_calls) == [
        api.ToolCallDelta(index=0, id="call_1", name="run", input=""),
        api.ToolCallDelta(index=0, input="1+"),
        api.ToolCallDelta(index=1, id="call_2", name="f", arguments="{}"),
    ]
    (whole,) = merge_chunks([chunk])
    assert list(whole.to_completion(VOCABULARY).tool_calls) == [
        api.ToolCall(id="call_1", name="run", input="1+"),
        api.ToolCall(id="call_2", name="f", arguments="{}"),
    ]
