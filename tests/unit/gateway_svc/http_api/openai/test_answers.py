"""Responses in OpenAI's format."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway_svc.http_api.openai.answer_options import NO_OPTIONS, AnswerOptions
from gateway_svc.http_api.openai.answers import ResponseBuilder
from gateway_svc.http_api.openai.choice_formats import ChatFormat, CompletionFormat, Format
from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob, Usage
from gateway_values import id_of, make_rendering, vocabulary_of
from tiny_model import tiny_tokenizer

VOCABULARY = vocabulary_of(tiny_tokenizer())
A, B = (id_of(tiny_tokenizer(), letter) for letter in "ab")
STOP = Finish(FinishReason.STOP, 2)


def answer(form: Format, num_prompts: int = 1, options: AnswerOptions = NO_OPTIONS, **fields: Any) -> ResponseBuilder:
    renderings = [make_rendering(VOCABULARY, **fields) for _ in range(num_prompts)]
    prompts = [[50 + index] for index in range(num_prompts)]
    return ResponseBuilder(
        form, renderings, VOCABULARY, created=12, options=options, prompts=prompts, fingerprint="fp_x"
    )


def decoded(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


def all_decoded(events: bytes) -> list[Any]:
    return [decoded(event + b"\n\n") for event in events.split(b"\n\n") if event]


class Counted(list[tuple[int, Chunk]]):
    """Chunks that count how often they are gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[tuple[int, Chunk]]:
        self.num_passes += 1
        return super().__iter__()


def test_the_chunks_of_many_prompts_are_gone_through_once() -> None:
    count = 64
    chunks = Counted((prompt, Chunk(0, at, f"{prompt}", [A])) for at in range(2) for prompt in range(count))
    whole = answer(CompletionFormat(), count).whole(chunks, Usage())
    assert [choice["text"] for choice in whole["choices"]] == [f"{prompt}{prompt}" for prompt in range(count)]
    assert chunks.num_passes == 1


def test_a_whole_chat_completion() -> None:
    chunks = [(0, Chunk(0, 0, "he", [A])), (0, Chunk(0, 1, "llo", [B, 2], finish=STOP))]
    assert answer(ChatFormat()).whole(chunks, Usage(5, 3, 4)) == {
        "id": "chatcmpl-some-id",
        "object": "chat.completion",
        "created": 12,
        "model": "tiny",
        "system_fingerprint": "fp_x",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None, "reasoning": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "seed": 7,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def test_a_whole_completion() -> None:
    whole = answer(CompletionFormat()).whole([(0, Chunk(0, 0, "hi", [A], finish=Finish(FinishReason.LENGTH)))], Usage())
    assert (whole["id"], whole["object"]) == ("cmpl-some-id", "text_completion")
    assert whole["choices"] == [
        {
            "index": 0,
            "text": "hi",
            "logprobs": None,
            "prompt_logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "seed": 7,
            "token_ids": None,
            "prompt_token_ids": None,
        }
    ]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    chunks = [(place, Chunk(index, 0, f"{place}{index}", finish=STOP)) for index in (1, 0) for place in (1, 0)]
    whole = answer(CompletionFormat(), num_prompts=2, n=2).whole(chunks, Usage())
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "00"), (1, "01"), (2, "10"), (3, "11"),
    ]  # fmt: skip


def test_the_first_event_of_a_choice_has_the_role_alone() -> None:
    stream = answer(ChatFormat(), n=2)
    events = [
        event
        for index, text in [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
        for event in all_decoded(stream.event(0, Chunk(index, 0, text)))
    ]
    role = {"role": "assistant", "content": ""}
    assert [(event["choices"][0]["index"], event["choices"][0]["delta"]) for event in events] == [
        (0, role), (0, {"content": "a"}), (1, role), (1, {"content": "b"}), (0, {"content": "c"}),
        (1, {"content": "d"}),
    ]  # fmt: skip
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["choices"][0]["finish_reason"] for event in events} == {None}


@pytest.mark.parametrize("form", [ChatFormat(), CompletionFormat()], ids=["chat", "completion"])
@pytest.mark.parametrize("text", ['"quoted" \\ {}', "two\nlines\r\t", "\0\x1f\x7f", "ł你😀\u2028\ufffd", " "])
def test_every_event_of_text_has_the_same_shape(form: Format, text: str) -> None:
    stream = answer(form)
    stream.event(0, Chunk(0, 0, "first", [A]))
    second, third = (decoded(stream.event(0, Chunk(0, place, piece, [B]))) for place, piece in [(1, "x"), (2, text)])
    choice = third["choices"][0]
    assert (choice["delta"]["content"] if isinstance(form, ChatFormat) else choice["text"]) == text
    assert json.dumps(third) == json.dumps(second).replace(json.dumps("x"), json.dumps(text))


def test_tokens_without_text_make_no_event() -> None:
    stream = answer(ChatFormat())
    assert stream.event(0, Chunk(0, 0, "", [A])) == b""
    assert all_decoded(stream.event(0, Chunk(0, 1, "x", [B])))[-1]["choices"][0]["delta"] == {"content": "x"}
    assert stream.event(0, Chunk(0, 2, "", [A])) == b""


def test_the_end_is_an_event_even_without_text() -> None:
    stream = answer(ChatFormat())
    events = all_decoded(stream.event(0, Chunk(0, 1, "", [2], finish=STOP)))
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


def test_each_event_of_a_completion_has_a_stop_reason() -> None:
    stream = answer(CompletionFormat(), stop_token_ids=(B,))
    first = decoded(stream.event(0, Chunk(0, 0, "a", [A])))
    last = decoded(stream.event(0, Chunk(0, 1, "b", [B], finish=Finish(FinishReason.STOP, B))))
    assert [event["choices"][0]["stop_reason"] for event in (first, last)] == [None, B]


def test_an_end_after_text_is_sent() -> None:
    stream = answer(CompletionFormat())
    stream.event(0, Chunk(0, 0, "a", [A]))
    (choice,) = decoded(stream.event(0, Chunk(0, 1, "b", [B], finish=Finish(FinishReason.LENGTH))))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["seed"]) == ("b", "length", 7)


def test_the_last_event_has_the_usage_and_no_choice() -> None:
    events = answer(CompletionFormat()).last_events(Usage(1, 2, 0))
    last = decoded(events.removesuffix(b"data: [DONE]\n\n"))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 3


@pytest.mark.parametrize(
    ("finish", "stop_reason"),
    [(Finish(FinishReason.STOP, "END"), "END"), (Finish(FinishReason.STOP, 9), 9), (STOP, None)],
)
def test_the_reason_of_a_stop_is_the_clients_own_string_or_token(finish: Finish, stop_reason: object) -> None:
    whole = answer(ChatFormat(), stop_token_ids=(9,)).whole([(0, Chunk(0, 0, "", [], finish=finish))], Usage())
    assert whole["choices"][0]["stop_reason"] == stop_reason


LOGPROBS = [
    TokenLogprob(A, -0.5, ((A, -0.5), (B, -1.5)), text_offset=0),
    TokenLogprob(B, float("-inf"), ((A, -0.1),), text_offset=1),
]


def test_logprobs_of_a_chat() -> None:
    chunk = Chunk(0, 0, "ab", [A, B], LOGPROBS, STOP)
    logprobs = answer(ChatFormat(), logprobs=2).whole([(0, chunk)], Usage())["choices"][0]["logprobs"]
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert logprobs["content"][0] == a | {"top_logprobs": [a, {"token": "b", "logprob": -1.5, "bytes": [98]}]}
    assert logprobs["content"][1]["logprob"] == -9999.0


def test_logprobs_of_a_completion() -> None:
    chunk = Chunk(0, 0, "ab", [A, B], LOGPROBS, STOP)
    stream = answer(CompletionFormat(), logprobs=2)
    stream.event(0, Chunk(0, 0, "a", [A], LOGPROBS[:1]))
    assert decoded(stream.event(0, chunk))["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"a": -0.1, "b": -9999.0}],
        "text_offset": [0, 1],
    }


def test_the_token_itself_is_the_first_of_the_top_tokens_of_a_completion() -> None:
    chunk = Chunk(0, 0, "ab", [A, B], LOGPROBS, STOP)
    whole = answer(CompletionFormat(), logprobs=2).whole([(0, chunk)], Usage())
    tops = whole["choices"][0]["logprobs"]["top_logprobs"]
    assert [list(top) for top in tops] == [["a", "b"], ["b", "a"]]


WITH_IDS = AnswerOptions(has_token_ids=True)
IN_TWO = [Chunk(0, 0, "", [A]), Chunk(0, 1, "x", [B, 2], finish=STOP)]


def test_token_ids_of_a_completion() -> None:
    whole = answer(CompletionFormat(), 2, WITH_IDS).whole([(1, chunk) for chunk in IN_TWO], Usage())
    assert [(one["prompt_token_ids"], one["token_ids"]) for one in whole["choices"]] == [([51], [A, B, 2])]
    stream = answer(CompletionFormat(), 2, WITH_IDS)
    first, last = [decoded(stream.event(1, chunk))["choices"][0] for chunk in IN_TWO]
    assert (first["prompt_token_ids"], first["token_ids"], first["text"]) == ([51], [A], "")
    assert "prompt_token_ids" not in last
    assert last["token_ids"] == [B, 2]


def test_token_ids_of_a_chat() -> None:
    whole = answer(ChatFormat(), options=WITH_IDS).whole([(0, chunk) for chunk in IN_TWO], Usage())
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([50], [A, B, 2])
    stream = answer(ChatFormat(), options=WITH_IDS)
    role, *others = [event for chunk in IN_TWO for event in all_decoded(stream.event(0, chunk))]
    assert (role["prompt_token_ids"], "token_ids" in role["choices"][0]) == ([50], False)
    assert [event["choices"][0]["token_ids"] for event in others] == [[A], [B, 2]]
    assert not any("prompt_token_ids" in event for event in others)


def test_events_may_have_the_usage_of_their_choice_so_far() -> None:
    stream = answer(ChatFormat(), options=AnswerOptions(has_running_usage=True))
    chunks = [Chunk(0, 0, "a", [A]), Chunk(0, 1, "b", [B, B]), Chunk(0, 3, "c", [A])]
    usages = [event["usage"] for chunk in chunks for event in all_decoded(stream.event(0, chunk))]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 3, 4]
    assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {usages[0]["prompt_tokens"]}


def test_log_probabilities_may_have_ids_instead_of_texts() -> None:
    options = AnswerOptions(names_tokens_by_id=True)
    chunk = Chunk(0, 0, "ab", [A, B], LOGPROBS, STOP)
    chat = answer(ChatFormat(), options=options, logprobs=2).whole([(0, chunk)], Usage())["choices"][0]["logprobs"]
    assert (chat["content"][0]["token"], chat["content"][0]["bytes"]) == (f"token_id:{A}", [97])
    logprobs = answer(CompletionFormat(), options=options, logprobs=2).whole([(0, chunk)], Usage())["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == [f"token_id:{A}", f"token_id:{B}"]
    assert logprobs["top_logprobs"][0] == {f"token_id:{A}": -0.5, f"token_id:{B}": -1.5}


def test_the_tier_is_in_the_answer_if_it_was_requested() -> None:
    with_tier = answer(ChatFormat(), options=AnswerOptions(service_tier="default"))
    assert with_tier.whole([(0, Chunk(0, 0, "a", [A], finish=STOP))], Usage())["service_tier"] == "default"
    assert "service_tier" not in answer(ChatFormat()).whole([(0, Chunk(0, 0, "a", [A], finish=STOP))], Usage())
