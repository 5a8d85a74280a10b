"""Prompts that are returned, with their log-probabilities: whole, streamed, resumed, and after a scheduler died."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from gateway_harness import Harness, encoded, rest_of
from gateway_svc.prompt_output import PromptOutput
from gateway_values import vocabulary_of
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import ScriptedScheduler, ScriptedSession, answer_with, length_end, stop_end
from tiny_model import EOS, tiny_tokenizer

TEXT = "hello 😀 world"
PROMPT, ANSWER = encoded(TEXT), encoded("and more")
VOCABULARY = vocabulary_of(tiny_tokenizer())
LOGPROBS = [
    worker_v1.TokenLogprobs(logprob=-1.0 - place, top=[worker_v1.Logprob(token_id=token, logprob=-0.5)])
    for place, token in enumerate(PROMPT[1:])
]


def prompt_event(key: str, logprobs: Sequence[worker_v1.TokenLogprobs], offset: int = 1) -> scheduler_v1.Event:
    found = scheduler_v1.PromptLogprobs(offset=offset, tokens=logprobs)
    return scheduler_v1.Event(key=key, prompt_logprobs=found)


def answer(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
    """The log-probabilities in two parts, then the tokens of both sequences, the second one's first."""
    session.accept(submit.key)
    if submit.HasField("result"):
        session.send([prompt_event(submit.key, LOGPROBS[:2])])
        # As after the failure of a scheduler, some come twice.
        session.send([prompt_event(submit.key, LOGPROBS[1:], offset=2)])
    for index in reversed(range(submit.n)):
        tokens = ANSWER[: submit.max_tokens]
        session.tokens(submit.key, tokens, 0, index, end=length_end())


def generation(**fields: Any) -> api.Generation:
    return api.Generation(**({"token_ids": api.TokenIds(ids=PROMPT)} | fields))


async def whole(quire: Harness, **fields: Any) -> api.GenerateResponse:
    return await quire.stub.Generate(api.GenerateRequest(generation=generation(**fields)))


def check_prompt(prompt: api.Prompt) -> None:
    assert list(prompt.token_ids) == PROMPT
    assert prompt.text == TEXT
    assert [(one.token_id, one.logprob) for one in prompt.logprobs] == [
        (token, -1.0 - place) for place, token in enumerate(PROMPT[1:])
    ]
    assert [[top.token_id for top in one.top] for one in prompt.logprobs] == [[token] for token in PROMPT[1:]]


async def test_a_prompt_is_returned_with_the_answer(quire: Harness) -> None:
    quire.scheduler.script = answer
    found = await whole(quire, prompt_logprobs=1, n=2)
    (submit,) = quire.scheduler.all("submit")
    assert submit.result.prompt_logprobs.num_top_logprobs == 1
    check_prompt(found.prompt)
    assert [one.text for one in found.completions] == ["and more"] * 2


async def test_echo_computes_nothing_more(quire: Harness) -> None:
    quire.scheduler.script = answer
    found = await whole(quire, echo=True)
    (submit,) = quire.scheduler.all("submit")
    assert not submit.HasField("result")
    assert (list(found.prompt.token_ids), found.prompt.text) == (PROMPT, TEXT)
    assert not found.prompt.logprobs
    assert not (await whole(quire)).HasField("prompt")


async def test_a_stream_has_the_prompt_before_its_chunks(quire: Harness) -> None:
    quire.scheduler.script = answer
    call = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation(prompt_logprobs=1, n=2)))
    messages = await rest_of(call)
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds[:2] == ["acceptance", "prompt"]
    assert set(kinds[2:-1]) == {"chunk"}
    check_prompt(messages[1].prompt)


@pytest.mark.parametrize("end", [length_end(), stop_end(EOS)], ids=["length", "stop"])
async def test_a_prompt_alone_has_no_output(end: scheduler_v1.SequenceEnd, quire: Harness) -> None:
    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        assert submit.max_tokens == 1
        session.accept(submit.key)
        session.send([prompt_event(submit.key, LOGPROBS)])
        logprobs = [worker_v1.TokenLogprobs(logprob=-2.0)]
        session.tokens(submit.key, [EOS], 0, end=end, logprobs=logprobs)

    quire.scheduler.script = script
    fields = {"prompt_logprobs": 1, "logprobs": 0, "stopping": api.Stopping(max_tokens=0)}
    found = await whole(quire, **fields)
    check_prompt(found.prompt)
    (completion,) = found.completions
    assert (completion.text, list(completion.token_ids), list(completion.logprobs)) == ("", [], [])
    assert completion.finish.reason == api.FINISH_REASON_LENGTH
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), 0)
    call = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation(**fields)))
    _, prompt, chunk, usage = await rest_of(call)
    check_prompt(prompt.prompt)
    assert (chunk.chunk.offset, chunk.chunk.finish.reason) == (0, api.FINISH_REASON_LENGTH)
    assert usage.usage.completion_tokens == 0


async def test_another_gateway_returns_the_prompt_too(quire: Harness) -> None:
    request = generation(prompt_logprobs=1, request_id="mine")
    call = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=request))
    submit = await quire.scheduler.next("submit")
    call.cancel()
    await quire.scheduler.next("detach")

    def attach(session: ScriptedSession, _: scheduler_v1.Attach) -> None:
        session.attached(submit, scheduler_v1.Tokens(token_ids=ANSWER, end=length_end()), prompt_logprobs=LOGPROBS)

    quire.scheduler.attach_script = attach
    for offset in (0, 2):
        positions = [api.Position(index=0, next_offset=offset)]
        resumed = quire.stub.Resume(api.ResumeRequest(request_id="mine", positions=positions))
        _, prompt, chunk, _ = await rest_of(resumed)
        check_prompt(prompt.prompt)
        assert list(chunk.chunk.token_ids) == ANSWER[offset:]


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_new_scheduler_is_sent_what_is_known_of_the_prompt(
    num_tokens: int, pair: tuple[Harness, ScriptedScheduler]
) -> None:
    quire, standby = pair
    num_known = len(LOGPROBS) if num_tokens else 2
    call = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation(prompt_logprobs=1)))
    submit = await quire.scheduler.next("submit")
    leader = quire.scheduler.session
    leader.accept(submit.key)
    leader.send([prompt_event(submit.key, LOGPROBS[:num_known])])
    await call.read()
    if num_tokens:
        leader.tokens(submit.key, ANSWER[:num_tokens], 0)
        await call.read()
        await call.read()
        leader.durable(submit.key, num_tokens)
    else:
        # Another event shows that the one before has arrived.
        other = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation()))
        leader.accept((await quire.scheduler.next("submit")).key)
        await other.read()
        other.cancel()
    quire.scheduler.is_leader, standby.is_leader = False, True
    leader.close()
    await standby.joined(1)
    while (attach := await standby.next("attach")).key != submit.key:
        pass
    (held,) = attach.unflushed
    assert list(held.prompt_logprobs) == LOGPROBS[:num_known]
    sequence = scheduler_v1.Tokens(token_ids=ANSWER[:num_tokens])
    standby.session.attached(submit, sequence, prompt_logprobs=LOGPROBS[:num_known])
    standby.session.send([prompt_event(submit.key, LOGPROBS[num_known:], offset=1 + num_known)])
    standby.session.tokens(submit.key, ANSWER[num_tokens:], num_tokens, end=length_end())
    messages = await rest_of(call)
    prompts = [message.prompt for message in messages if message.WhichOneof("event") == "prompt"]
    assert len(prompts) == (0 if num_tokens else 1)
    for prompt in prompts:
        check_prompt(prompt)
    tokens = [token for message in messages for token in message.chunk.token_ids]
    assert tokens == ANSWER[num_tokens:]


def logprobs_of(submit: scheduler_v1.Submit, token_ids: Sequence[int]) -> list[worker_v1.TokenLogprobs]:
    """As a worker returns them: the token is its position's top token."""
    if not submit.sampling.HasField("logprobs"):
        return []
    top = [[worker_v1.Logprob(token_id=token, logprob=-0.25)][: submit.sampling.logprobs] for token in token_ids]
    requested = [-5.0] * len(submit.sampling.logprob_token_ids)
    return [worker_v1.TokenLogprobs(logprob=-0.25, top=one, requested=requested) for one in top]


def answer_with_logprobs(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
    session.accept(submit.key)
    if submit.HasField("result"):
        session.send([prompt_event(submit.key, LOGPROBS)])
    for index in range(submit.n):
        tokens = ANSWER[: submit.max_tokens]
        logprobs = logprobs_of(submit, tokens)
        session.tokens(submit.key, tokens, 0, index, end=length_end(), logprobs=logprobs)


async def completed(quire: Harness, **fields: Any) -> dict[str, Any]:
    quire.scheduler.script = answer_with_logprobs
    response = await quire.http.post("/v1/completions", json={"prompt": PROMPT, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


TOKEN_TEXTS = [VOCABULARY.token_text(token) for token in PROMPT]
PROMPT_VALUES = [None, *(-1.0 - place for place in range(len(LOGPROBS)))]
ANSWER_TEXTS = [VOCABULARY.token_text(token) for token in ANSWER]


@pytest.mark.parametrize("max_tokens", [0, 1, 100])
async def test_an_echo_over_http_has_the_prompts_log_probabilities(max_tokens: int, quire: Harness) -> None:
    """The body that lm_eval sends for log-likelihoods."""
    body = await completed(quire, echo=True, logprobs=1, max_tokens=max_tokens, n=2)
    num_tokens = min(max_tokens, len(ANSWER))
    for choice in body["choices"]:
        assert choice["text"] == TEXT + "".join(ANSWER_TEXTS[:num_tokens])
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == TOKEN_TEXTS + ANSWER_TEXTS[:num_tokens]
        assert logprobs["token_logprobs"] == PROMPT_VALUES + [-0.25] * num_tokens
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1] == {TOKEN_TEXTS[1]: -0.5}
        assert logprobs["text_offset"][len(PROMPT) :] == [
            len(TEXT) + len("".join(ANSWER_TEXTS[:place])) for place in range(num_tokens)
        ]
        assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2 * num_tokens


async def test_an_echo_with_requested_tokens_has_the_prompts_log_probabilities(quire: Harness) -> None:
    (choice,) = (await completed(quire, echo=True, logprob_token_ids=[EOS]))["choices"]
    assert choice["logprobs"]["tokens"] == TOKEN_TEXTS + ANSWER_TEXTS
    assert choice["logprobs"]["token_logprobs"] == PROMPT_VALUES + [-0.25] * len(ANSWER)


async def test_an_echo_without_log_probabilities_is_text(quire: Harness) -> None:
    body = await completed(quire, echo=True, max_tokens=100, prompt=[PROMPT, PROMPT])
    assert [choice["text"] for choice in body["choices"]] == [TEXT + "".join(ANSWER_TEXTS)] * 2
    assert {choice["logprobs"] for choice in body["choices"]} == {None}
    assert body["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "echoed"),
    [
        ({}, "<|im_start|>hello<|im_end|>"),
        ({"skip_special_tokens": False}, "<|im_start|>hello<|im_end|>"),
        ({"truncate_prompt_tokens": 2}, "hello"),
        ({"prompt": encoded("<|im_start|>hello<|im_end|>")}, "hello"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_echoed_with_its_special_tokens(
    fields: dict[str, Any], echoed: str, stream: bool, quire: Harness
) -> None:
    quire.scheduler.script = answer_with(ANSWER)
    body = {"prompt": "<|im_start|>hello<|im_end|>", "echo": True, "max_tokens": 100, "stream": stream, **fields}
    response = await quire.http.post("/v1/completions", json=body)
    lines = response.text.split("\n\n") if stream else [f"data: {response.text}"]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == echoed + "".join(ANSWER_TEXTS)


async def test_an_echo_is_at_the_beginning_of_a_stream(quire: Harness) -> None:
    quire.scheduler.script = answer_with_logprobs
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 100, "stream": True, "n": 2}
    lines = (await quire.http.post("/v1/completions", json=fields)).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    for index in range(2):
        pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == TEXT + "".join(ANSWER_TEXTS)
        tokens = [token for piece in pieces for token in piece["logprobs"]["tokens"]]
        assert tokens == TOKEN_TEXTS + ANSWER_TEXTS


async def test_prompt_logprobs_over_http_are_as_vllms(quire: Harness) -> None:
    expected = [None] + [
        {str(token): {"logprob": -0.5, "rank": 1, "decoded_token": VOCABULARY.token_text(token)}}
        for token in PROMPT[1:]
    ]
    body = await completed(quire, prompt_logprobs=1, return_tokens_as_token_ids=True)
    assert body["choices"][0]["prompt_logprobs"] == expected
    assert body["choices"][0]["text"] == "".join(ANSWER_TEXTS)
    chat = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1, "max_tokens": 5}

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        token_ids = submit.prompt_token_ids[1:]
        session.send([prompt_event(submit.key, [worker_v1.TokenLogprobs(logprob=-1.0)] * len(token_ids))])
        session.tokens(submit.key, ANSWER, 0, end=length_end())

    quire.scheduler.script = script
    whole_chat = (await quire.http.post("/v1/chat/completions", json=chat)).json()
    first, *others = whole_chat["prompt_logprobs"]
    assert first is None
    assert {one["logprob"] for entry in others for one in entry.values()} == {-1.0}
    assert {one["rank"] for entry in others for one in entry.values()} == {None}


async def test_requested_tokens_are_instead_of_the_top_ones_over_http(quire: Harness) -> None:
    other = next(token for token in range(5, 50) if token not in ANSWER)
    fields: dict[str, Any] = {"logprob_token_ids": [other], "max_tokens": 2}
    body = await completed(quire, **fields)
    tops = body["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == [{text: -0.25, VOCABULARY.token_text(other): -5.0} for text in ANSWER_TEXTS[:2]]
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1, **fields}
    answered = (await quire.http.post("/v1/chat/completions", json=chat)).json()
    content = answered["choices"][0]["logprobs"]["content"]
    assert [[top["logprob"] for top in one["top_logprobs"]] for one in content] == [[-0.25, -5.0]] * 2


async def test_fields_of_sampling_over_http_are_those_over_grpc(quire: Harness) -> None:
    fields: dict[str, Any] = {"allowed_token_ids": [5, 6], "bad_words": ["hello"], "seed": 1}
    await completed(quire, truncate_prompt_tokens=2, spaces_between_special_tokens=False, **fields)
    (by_http,) = quire.scheduler.all("submit")
    assert list(by_http.prompt_token_ids) == PROMPT[-2:]
    quire.scheduler.reset()
    quire.scheduler.script = answer
    await whole(quire, sampling=api.Sampling(**fields), truncate_prompt_tokens=2)
    (by_grpc,) = quire.scheduler.all("submit")
    assert by_http.sampling == by_grpc.sampling
    assert by_grpc.sampling.allowed_token_ids == [5, 6]


@pytest.fixture
def rendered_in(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which prompts become output."""
    threads: list[threading.Thread] = []
    of = PromptOutput.of

    def recorded(*arguments: Any) -> PromptOutput:
        threads.append(threading.current_thread())
        return of(*arguments)

    monkeypatch.setattr(PromptOutput, "of", recorded)
    return threads


@pytest.mark.parametrize(("length", "is_long"), [(4, False), (40, True)])
async def test_a_prompt_with_many_logprobs_does_not_hold_up_other_calls(
    length: int, is_long: bool, quire: Harness, rendered_in: list[threading.Thread]
) -> None:
    prompt = (PROMPT * length)[:length]
    top = [worker_v1.Logprob(token_id=token, logprob=-1) for token in range(20)]

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        logprobs = [worker_v1.TokenLogprobs(logprob=-1, top=top) for _ in prompt[1:]]
        session.send([prompt_event(submit.key, logprobs)])
        session.tokens(submit.key, ANSWER, 0, end=length_end(), logprobs=logprobs[:1] * len(ANSWER))

    quire.scheduler.script = script
    generation = api.Generation(token_ids=api.TokenIds(ids=prompt), prompt_logprobs=20)
    answer = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    messages = await rest_of(quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation)))
    assert [one.prompt for one in messages if one.HasField("prompt")] == [answer.prompt]
    assert len(answer.prompt.logprobs) == length - 1
    whole = (await quire.http.post("/v1/completions", json={"prompt": prompt, "prompt_logprobs": 20})).json()
    assert len(whole["choices"][0]["prompt_logprobs"]) == length
    body = {"prompt": prompt, "echo": True, "logprobs": 5, "stream": True}
    streamed = (await quire.http.post("/v1/completions", json=body)).text
    first = json.loads(streamed.partition("\n")[0].removeprefix("data: "))
    assert len(first["choices"][0]["logprobs"]["tokens"]) == length + len(ANSWER)
    assert [thread is not threading.main_thread() for thread in rendered_in] == [is_long] * 4
