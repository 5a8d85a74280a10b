"""Reasoning, text and calls of a sequence: a function of its tokens, from any position of the client."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers_with_calls import ANSWERS, CUSTOM_TOOL, Answer, format_of
from gateway_svc.chat_template import TemplateChat
from gateway_svc.chats import PromptEnd
from gateway_svc.message_formats.formats import AUTO, TOOL_FORMATS, choose_format
from gateway_svc.output import Chunk, FinishReason, ToolCallDelta, merge_chunks
from gateway_svc.rendering import Rendering
from gateway_svc.resume_position import EndDelivery, ResumePosition
from gateway_svc.sequence_output import SequenceOutput
from gateway_svc.sequence_remainder import remainder
from gateway_svc.turn_format import TurnFormat
from gateway_svc.validated_request import SpecialTokens, StopText
from gateway_svc.vocabulary import Vocabulary
from gateway_values import make_rendering, vocabulary_of
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import cut_end, length_end, stop_end
from tool_families import CALLING_FAMILIES, TOOL_FAMILIES, tool

EOS = 0
TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool(CUSTOM_TOOL, input={"type": "string"}),
]

answers = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


@cache
def vocabulary(family: str) -> Vocabulary:
    return vocabulary_of(CALLING_FAMILIES[family].tokenizer)


def rendering(family: str, *, has_one_call: bool = False, must_call: bool = False, **fields: Any) -> Rendering:
    """Of a chat with the tools; it is sent to the scheduler and back."""
    chat = TemplateChat(
        [],
        callable_tools=TOOLS,
        custom_tools=frozenset({CUSTOM_TOOL}),
        has_one_call=has_one_call,
        must_call=must_call,
    )
    turn = TurnFormat.of_prompt(format_of(family), chat, "")
    assert turn is not None
    made = make_rendering(vocabulary(family), **fields)
    return replace(made, turn=TurnFormat.from_proto(turn.to_proto()))


def steps(token_ids: list[int], sizes: list[int], end: scheduler_v1.SequenceEnd) -> list[scheduler_v1.Tokens]:
    tokens, offset = [], 0
    for size in [*sizes, len(token_ids)]:
        if piece := token_ids[offset : offset + size]:
            tokens.append(scheduler_v1.Tokens(offset=offset, token_ids=piece))
            offset += len(piece)
    tokens[-1].end.CopyFrom(end)
    return tokens


def given_out(
    family: str, made: Rendering, tokens: list[scheduler_v1.Tokens], start: ResumePosition | None = None
) -> list[Chunk]:
    """The chunks of a sequence, one for each step."""
    sequence = SequenceOutput(0, vocabulary(family), made, start or ResumePosition())
    chunks: list[Chunk] = []
    for one in tokens:
        if sequence.finish is None:
            sequence.extend(one)
            chunks += sequence.pop_pending()
    return chunks


def whole_of(answer: Answer, **fields: Any) -> Chunk:
    made = rendering(answer.family, **fields)
    (whole,) = merge_chunks(given_out(answer.family, made, steps([*answer.token_ids, EOS], [], stop_end(EOS))))
    return whole


def taken(name: str, text: str) -> Any:
    """What a tool takes: a text, or arguments."""
    return text if name == CUSTOM_TOOL else json.loads(text)


def test_every_format_has_an_answer() -> None:
    found = [format_of(answer.family).tools for answer in ANSWERS.values() if answer.calls]
    assert {one.name for one in found if one is not None} == TOOL_FORMATS.keys()


@answers
def test_an_answer_is_divided(answer: Answer) -> None:
    whole = whole_of(answer)
    assert (whole.text, whole.reasoning) == (answer.text, answer.reasoning)
    given_out = [(call.name, call.arguments) for call in whole.tool_calls]
    assert [(name, taken(name, text)) for name, text in given_out] == [
        (name, taken(name, text)) for name, text in answer.calls
    ]
    assert [call.is_custom for call in whole.tool_calls] == [name == CUSTOM_TOOL for name, _ in answer.calls]
    assert whole.finish is not None
    assert whole.finish.reason is (FinishReason.TOOL_CALLS if answer.calls else FinishReason.STOP)


@answers
@pytest.mark.parametrize("num_examples", [8, pytest.param(25, marks=pytest.mark.large)])
def test_what_is_given_from_any_token_on_is_the_rest_of_the_whole(answer: Answer, num_examples: int) -> None:
    family, token_ids = answer.family, answer.token_ids

    @settings(deadline=None, max_examples=num_examples)
    @given(
        sizes=st.lists(st.integers(1, 7), max_size=40),
        cut=st.integers(1, len(token_ids)),
        stop=st.lists(st.text('<tool_cal>"aã} 你', min_size=1, max_size=3), max_size=2, unique=True),
        include=st.booleans(),
        kept=st.booleans(),
    )
    def check(sizes: list[int], cut: int, stop: list[str], include: bool, kept: bool) -> None:
        made = rendering(
            family,
            stop=tuple(stop),
            stop_text=StopText.INCLUDED if include else StopText.EXCLUDED,
            special_tokens=SpecialTokens.KEPT if kept else SpecialTokens.HIDDEN,
        )
        end = length_end()
        (whole,) = merge_chunks(given_out(family, made, steps(token_ids[:cut], sizes, end)))
        assert whole == merge_chunks(given_out(family, made, steps(token_ids[:cut], [1] * cut, end)))[0]
        record = scheduler_v1.Tokens(token_ids=whole.token_ids, end=end)
        if whole.finish is not None and isinstance(whole.finish.matched, str):
            record.end.CopyFrom(cut_end())
        for num_tokens in range(len(whole.token_ids) + 1):
            before = prefix(family, made, whole.token_ids[:num_tokens])
            start = ResumePosition(num_tokens, EndDelivery.UNKNOWN, "where")
            (rest,) = merge_chunks(given_out(family, made, [record], start))
            assert [rest] == remainder(whole, start, vocabulary(family), made)
            if num_tokens < len(whole.token_ids):
                assert joined(before, rest) == joined(whole)

    check()


def prefix(family: str, made: Rendering, token_ids: list[int]) -> Chunk:
    """What a client has of a sequence that has not ended after these tokens."""
    sequence = SequenceOutput(0, vocabulary(family), made, ResumePosition())
    sequence.extend(scheduler_v1.Tokens(token_ids=token_ids))
    return next(iter(sequence.pop_pending()), Chunk(0, 0))


def joined(*chunks: Chunk) -> tuple[str, str, list[ToolCallDelta]]:
    """What a client makes of pieces."""
    (whole,) = merge_chunks([replace(chunk, tool_calls=[replace(one) for one in chunk.tool_calls]) for chunk in chunks])
    return whole.text, whole.reasoning, whole.tool_calls


def test_the_tokens_of_text_are_not_those_of_headers() -> None:
    """Two messages of text are divided by a line break that no token has."""
    thought = "<|end|><|start|>assistant<|channel|>analysis<|message|>Hm."
    written = f"<|channel|>commentary<|message|>So.{thought}<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    tokenizer = CALLING_FAMILIES["gpt-oss"].tokenizer
    token_ids = tokenizer.encode(written, add_special_tokens=False).ids
    made = rendering("gpt-oss", logprobs=0)
    sequence = SequenceOutput(0, vocabulary("gpt-oss"), made, ResumePosition(), chunk_per_token=True)
    logprobs = [worker_v1.TokenLogprobs(logprob=-0.5)] * len(token_ids)
    sequence.extend(scheduler_v1.Tokens(token_ids=token_ids, logprobs=logprobs, end=length_end()))
    chunks = sequence.pop_pending()
    assert "".join(chunk.text for chunk in chunks) == "So.\nYes."
    named = [token_ids[token] for chunk in chunks for token in chunk.text_tokens]
    assert tokenizer.decode(named, skip_special_tokens=False) == "So.Yes."


@pytest.mark.parametrize("stop_text", StopText)
def test_the_token_that_ends_an_answer_ends_a_call_without_arguments(stop_text: StopText) -> None:
    tokenizer = CALLING_FAMILIES["gpt-oss"].tokenizer
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    token_ids = tokenizer.encode(f"{header}<|call|>", add_special_tokens=False).ids
    made = rendering("gpt-oss", stop_text=stop_text)

    def given(tokens: list[int], end: scheduler_v1.SequenceEnd) -> tuple[FinishReason, str, list[str]]:
        (whole,) = merge_chunks(given_out("gpt-oss", made, steps(tokens, [1] * len(tokens), end)))
        assert whole.finish is not None
        return whole.finish.reason, whole.text, [call.arguments for call in whole.tool_calls]

    assert given(token_ids, stop_end(token_ids[-1])) == (FinishReason.TOOL_CALLS, "", ["{}"])
    assert given(token_ids[:-1], length_end()) == (FinishReason.LENGTH, "", [])


def test_ids_are_the_same_everywhere_and_differ_between_calls_sequences_and_requests() -> None:
    two = ANSWERS["two calls"]
    first, second = whole_of(two).tool_calls
    assert first.id.startswith("call_")
    assert [call.id for call in whole_of(two).tool_calls] == [first.id, second.id]
    other = whole_of(two, request_id="another").tool_calls
    assert len({first.id, second.id, *(call.id for call in other)}) == 4
    sequence = SequenceOutput(1, vocabulary("hermes"), rendering("hermes"), ResumePosition())
    sequence.extend(scheduler_v1.Tokens(token_ids=two.token_ids))
    [chunk] = sequence.pop_pending()
    assert {call.id for call in chunk.tool_calls if call.id}.isdisjoint({first.id, second.id})


@given(data=st.data())
def test_a_chunk_for_each_token_is_the_same_however_tokens_arrive(data: st.DataObject) -> None:
    answer = data.draw(st.sampled_from(list(ANSWERS.values())))
    made = rendering(answer.family)
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=40))

    def chunks_of(parts: list[scheduler_v1.Tokens]) -> list[Chunk]:
        sequence = SequenceOutput(0, vocabulary(answer.family), made, ResumePosition(), chunk_per_token=True)
        chunks: list[Chunk] = []
        for part in parts:
            sequence.extend(part)
            if data.draw(st.booleans()):
                chunks += sequence.pop_pending()
        return chunks + sequence.pop_pending()

    token_ids = [*answer.token_ids, EOS]
    at_once = chunks_of(steps(token_ids, [len(token_ids)], stop_end(EOS)))
    assert [len(chunk.token_ids) for chunk in at_once] == [1] * len(token_ids) + [0]
    assert chunks_of(steps(token_ids, sizes, stop_end(EOS))) == at_once
    assert joined(*at_once) == joined(whole_of(answer))


def test_without_parallel_calls_only_the_first_is_sent() -> None:
    assert len(whole_of(ANSWERS["two calls"], has_one_call=True).tool_calls) == 1


def finish_of(family: str, written: str, **fields: Any) -> tuple[FinishReason, Chunk]:
    """The reason to finish is the same from any token on."""
    token_ids = TOOL_FAMILIES[family].tokenizer.encode(written, add_special_tokens=False).ids
    made = rendering(family, **fields)
    end = stop_end(EOS)
    tokens = steps([*token_ids, EOS], [1] * len(token_ids), end)
    (whole,) = merge_chunks(given_out(family, made, tokens))
    assert whole.finish is not None
    record = scheduler_v1.Tokens(token_ids=whole.token_ids, end=end)
    if isinstance(whole.finish.matched, str):
        record.end.CopyFrom(cut_end())
    for num_tokens in range(len(whole.token_ids) + 1):
        start = ResumePosition(num_tokens, EndDelivery.UNKNOWN, "where")
        assert merge_chunks(given_out(family, made, [record], start))[0].finish == whole.finish
    return whole.finish.reason, whole


def test_a_call_that_was_held_back_as_a_stop_string_is_the_reason_to_finish() -> None:
    written = '{"name": "get_weather", "parameters": {}}'
    reason, whole = finish_of("llama3.1", written, stop=(f"{written}!",))
    assert (reason, [call.arguments for call in whole.tool_calls]) == (FinishReason.TOOL_CALLS, ["{}"])


_COMPLETE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("written", "fields", "reason"),
    [
        (_COMPLETE.partition("Ro")[0], {}, FinishReason.STOP),
        (_COMPLETE, {"stop": ("Rom",)}, FinishReason.STOP),
        # The arguments are complete, and only what is around them was cut.
        (_COMPLETE.partition("\n</")[0], {}, FinishReason.TOOL_CALLS),
        (_COMPLETE, {"stop": ("</tool",)}, FinishReason.TOOL_CALLS),
        (_COMPLETE + _COMPLETE.partition("Ro")[0], {}, FinishReason.STOP),
        (_COMPLETE + _COMPLETE.partition("Ro")[0], {"has_one_call": True}, FinishReason.TOOL_CALLS),
    ],
    ids=["end", "stop string", "no marker", "stop string in the marker", "second call", "second call is not sent"],
)
def test_a_call_that_was_cut_is_no_reason_to_finish(written: str, fields: Any, reason: FinishReason) -> None:
    assert finish_of("hermes", written, **fields)[0] is reason


@pytest.mark.parametrize("sizes", [[], [1] * 64], ids=["at once", "token by token"])
def test_where_calls_are_required_what_was_cut_around_them_is_no_text(sizes: list[int]) -> None:
    token_ids = TOOL_FAMILIES["hermes"].tokenizer.encode(_COMPLETE, add_special_tokens=False).ids
    made = rendering("hermes", must_call=True)
    for length in range(1, len(token_ids) + 1):
        (whole,) = merge_chunks(given_out("hermes", made, steps(token_ids[:length], sizes, length_end())))
        assert whole.text == ""
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [("get_weather", '{"city": "Rome"}')]


def test_arguments_stream_as_they_are_generated() -> None:
    answer = ANSWERS["two calls"]
    chunks = given_out(
        "hermes", rendering("hermes"), steps(answer.token_ids, [1] * len(answer.token_ids), length_end())
    )
    fragments = [call.arguments for chunk in chunks for call in chunk.tool_calls if call.index == 0]
    assert len(fragments) > len(ANSWERS["two calls"].calls[0][1]) / 10


def test_text_that_only_looks_like_a_marker_is_text() -> None:
    tokenizer = TOOL_FAMILIES["hermes"].tokenizer
    spelled = [
        one for part in ("<tool", "_call>", "{}") for one in tokenizer.encode(part, add_special_tokens=False).ids
    ]
    made = rendering("hermes")
    (whole,) = merge_chunks(given_out("hermes", made, steps([*spelled, EOS], [], stop_end(EOS))))
    assert (whole.text, whole.tool_calls) == ("<tool_call>{}", [])


def test_a_prompt_may_end_within_the_reasoning() -> None:
    family = TOOL_FAMILIES["hermes"]
    message_format = choose_format(AUTO, AUTO, family.template.constants)
    turn = TurnFormat.of_prompt(message_format, TemplateChat([]), "<|im_start|>assistant\n<think>\n")
    assert turn is not None
    assert turn.is_reasoning_open
    made = replace(make_rendering(vocabulary("hermes")), turn=TurnFormat.from_proto(turn.to_proto()))
    token_ids = family.tokenizer.encode("Hm.</think>\n\nYes.<tool_call>", add_special_tokens=False).ids
    (whole,) = merge_chunks(given_out("hermes", made, steps([*token_ids, EOS], [], stop_end(EOS))))
    output = SequenceOutput(0, vocabulary("hermes"), made, ResumePosition())
    output.extend(scheduler_v1.Tokens(token_ids=token_ids))
    of_reasoning = family.tokenizer.encode("Hm.", add_special_tokens=False).ids
    assert output.num_reasoning_tokens == len(of_reasoning) > 0
    # Without tools a marker of calls is text.
    assert (whole.reasoning, whole.text, whole.tool_calls) == ("Hm.", "Yes.<tool_call>", [])


def test_a_continued_answer_may_end_within_the_reasoning() -> None:
    message_format = choose_format(AUTO, AUTO, TOOL_FAMILIES["hermes"].template.constants)
    messages = [{"role": "assistant", "content": "<think>I should"}]
    for prompt_end, is_open in ((PromptEnd.CONTINUATION, True), (PromptEnd.ANSWER, False)):
        turn = TurnFormat.of_prompt(message_format, TemplateChat(messages, prompt_end=prompt_end), "I should")
        assert turn is not None
        assert turn.is_reasoning_open is is_open


def test_answers_of_models_without_formats_are_text() -> None:
    message_format = choose_format(AUTO, AUTO, "{{ messages }}")
    assert TurnFormat.of_prompt(message_format, TemplateChat([]), "") is None
    hermes = choose_format(AUTO, AUTO, "<tool_call>")
    assert TurnFormat.of_prompt(hermes, TemplateChat([]), "") is None
