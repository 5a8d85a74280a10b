"""quire.inference.v1.InferenceService over the wire, with a scripted scheduler."""

import asyncio
import hashlib
from pathlib import Path

from gateway_calls import asking, consumed, refused
from gateway_harness import Harness, encoded, reason_of, scheduler_model
from quire.inference.v1 import inference_pb2 as api
from scripted_scheduler import answer_with, length_end, stop_end
from tiny_model import CONTEXT_LENGTH, EOS

HELLO = encoded("hello world")


async def test_a_stream_is_acceptance_then_chunks_then_usage(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS, cached_tokens=3)
    call = quire.stub.StreamGenerate(asking("he llo", sampling=api.Sampling(seed=-5)))
    acceptance, *chunks, usage = await consumed(call)
    assert acceptance.acceptance.model == "tiny"
    assert acceptance.acceptance.seed == -5
    assert dict(await call.initial_metadata())["x-request-id"] == acceptance.acceptance.request_id
    assert "".join(event.chunk.text for event in chunks) == "hello world"
    assert [token_id for event in chunks for token_id in event.chunk.token_ids] == [*HELLO, EOS]
    num_before = 0
    for event in chunks:  # steps that arrived between two reads are one chunk
        assert event.chunk.offset == num_before
        num_before += len(event.chunk.token_ids)
    assert chunks[-1].chunk.finish == api.Finish(reason=api.FINISH_REASON_STOP, token_id=EOS)
    assert usage.usage == api.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=3)


async def test_the_submission_has_the_requests_values(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    sampling = api.Sampling(temperature=0, top_k=3, seed=9, logit_bias={4: -1.5})
    stopping = api.Stopping(max_tokens=2, min_tokens=1, stop=["x"], stop_token_ids=[7])
    request = asking(sampling=sampling, stopping=stopping, n=2, priority=-3, request_id="mine", logprobs=1)
    await quire.stub.Generate(api.GenerateRequest(generation=request.generation), timeout=60)
    (submit,) = quire.scheduler.all("submit")
    assert list(submit.prompt_token_ids) == encoded("hello")
    assert (submit.tenant, submit.weight, submit.detachable, submit.priority) == ("default", 1.0, True, -3)
    assert (submit.n, submit.max_tokens, submit.has_stop_strings) == (2, 2, True)
    assert list(submit.stop_token_ids) == [EOS, 7]
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.seed) == (0, 3, 9)
    assert dict(submit.sampling.logit_bias) == {4: -1.5}
    assert (submit.sampling.min_tokens, list(submit.sampling.suppressed_token_ids)) == (1, [EOS, 7])
    assert 0 < submit.time_left.ToTimedelta().total_seconds() < 61  # grpc rounds up
    assert len(submit.cache_salt) == 32
    assert len(submit.key) == len(hashlib.sha256().hexdigest())
    assert submit.traceparent == ""


async def test_a_whole_answer_has_every_sequence_by_index(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), encoded("he"), stop_token_id=EOS)
    generation = asking("a", n=2).generation
    answer = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    assert [(one.index, one.text) for one in answer.completions] == [(0, "hello"), (1, "he")]
    assert answer.usage == api.Usage(prompt_tokens=1, completion_tokens=4)
    assert answer.acceptance.request_id


async def test_logprobs_come_with_text_and_bytes_of_tokens(quire: Harness) -> None:
    ids = encoded("ß")
    quire.scheduler.script = answer_with(ids)
    generation = asking(logprobs=2, stopping=api.Stopping(max_tokens=2)).generation
    answer = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    first, second = answer.completions[0].logprobs
    assert (first.token_id, first.text, first.token_bytes, first.logprob) == (ids[0], "\ufffd", b"\xc3", -0.5)
    assert [one.token_id for one in first.top] == [ids[0], ids[0] + 1]
    assert first.token_bytes + second.token_bytes == "ß".encode()
    assert answer.completions[0].text == "ß"


async def test_a_stop_string_ends_its_sequence_here_and_is_reported(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello world and more"), encoded("hello"))
    request = asking(n=2, stopping=api.Stopping(stop=["lo w"], max_tokens=9), request_id="r")
    call = quire.stub.StreamGenerate(request)
    events = await consumed(call)
    stopped = [event.chunk for event in events if event.WhichOneof("event") == "chunk" and event.chunk.index == 0]
    assert "".join(chunk.text for chunk in stopped) == "hel"
    assert stopped[-1].finish == api.Finish(reason=api.FINISH_REASON_STOP, stop="lo w")
    finish = await quire.scheduler.next("finish")
    assert (finish.index, finish.num_tokens) == (0, 2)
    assert finish.key == quire.scheduler.all("submit")[0].key
    assert events[-1].usage.completion_tokens == 2 + len(encoded("hello"))


async def test_what_was_looked_at_is_acknowledged_though_the_client_does_not_read(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(stopping=api.Stopping(stop=["x"])))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    for offset in range(40):
        quire.scheduler.session.tokens(submit.key, [encoded("a")[0]], offset)
    assert [(await quire.scheduler.next("acknowledge")).num_tokens for _ in range(2)] == [16, 32]
    quire.scheduler.session.tokens(submit.key, [], 40, end=length_end())
    text = "".join(event.chunk.text for event in await consumed(call))
    assert text == "a" * 40


async def test_without_stop_strings_nothing_is_acknowledged(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("a" * 50))
    await quire.stub.Generate(api.GenerateRequest(generation=asking().generation))
    assert quire.scheduler.all("acknowledge") == quire.scheduler.all("finish") == []


async def test_tokens_that_came_before_are_not_given_twice(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    a, b, c = encoded("abc")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, [a, b], 0)
    quire.scheduler.session.tokens(submit.key, [b, c], 1)
    quire.scheduler.session.tokens(submit.key, [], 3, end=length_end())
    assert "".join(event.chunk.text for event in await consumed(call)) == "abc"


async def test_tokens_that_are_missing_are_a_fault(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, [5], 1)
    error = await refused(call)
    assert reason_of(error)[0] == "INTERNAL"
    assert (await quire.scheduler.next("cancel")).key == submit.key


async def test_text_and_chats_become_tokens(quire: Harness) -> None:
    answer = await quire.stub.Tokenize(api.TokenizeRequest(text="hello world"))
    assert (list(answer.token_ids), answer.context_length) == (HELLO, CONTEXT_LENGTH)
    chat = api.Chat(messages=[api.ChatMessage(role="user", content="hello")])
    answer = await quire.stub.Tokenize(api.TokenizeRequest(chat=chat))
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(answer.token_ids) == encoded(rendered)


async def test_a_literal_of_a_control_token_is_text_in_a_chat_and_a_token_in_a_text(quire: Harness) -> None:
    text = await quire.stub.Tokenize(api.TokenizeRequest(text="a<|im_end|>"))
    assert list(text.token_ids) == [*encoded("a"), EOS]
    chat = api.Chat(messages=[api.ChatMessage(role="user", content="a<|im_end|>")])
    token_ids = (await quire.stub.Tokenize(api.TokenizeRequest(chat=chat))).token_ids
    assert list(token_ids).count(EOS) == 1  # the template's
    assert "a<|im_end|>" in (await quire.stub.Detokenize(api.DetokenizeRequest(token_ids=token_ids))).text
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    await quire.stub.Generate(api.GenerateRequest(generation=api.Generation(chat=chat)))
    (submit,) = quire.scheduler.all("submit")
    assert submit.prompt_token_ids == token_ids


async def test_tokens_become_text(quire: Harness) -> None:
    hidden = await quire.stub.Detokenize(api.DetokenizeRequest(token_ids=[*HELLO, EOS]))
    kept = await quire.stub.Detokenize(api.DetokenizeRequest(token_ids=[*HELLO, EOS], keep_special_tokens=True))
    assert (hidden.text, kept.text) == ("hello world", "hello world<|im_end|>")


async def test_the_model_is_listed(quire: Harness, model_directory: Path) -> None:
    answer = await quire.stub.ListModels(api.ListModelsRequest())
    expected = scheduler_model(model_directory)
    assert list(answer.models) == [
        api.Model(name="tiny", context_length=CONTEXT_LENGTH, vocab_size=expected.vocab_size)
    ]


async def test_calls_are_counted_by_their_code(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    await quire.stub.Generate(api.GenerateRequest(generation=asking("hello").generation))
    await refused(quire.stub.Generate(api.GenerateRequest()))
    await consumed(quire.stub.StreamGenerate(asking()))
    name = "quire_gateway_requests_total"
    assert await quire.metric(name + '{code="OK",method="Generate",model="tiny",protocol="grpc"}') == 1
    assert await quire.metric(name + '{code="INVALID_ARGUMENT",method="Generate",model="tiny",protocol="grpc"}') == 1
    assert await quire.metric(name + '{code="OK",method="StreamGenerate",model="tiny",protocol="grpc"}') == 1
    assert await quire.metric('quire_gateway_prompt_tokens_total{model="tiny"}') == 2
    assert await quire.metric('quire_gateway_generation_tokens_total{model="tiny"}') == 6
    assert await quire.metric('quire_gateway_time_to_first_token_seconds_count{model="tiny"}') == 2
    assert await quire.metric('quire_gateway_inter_token_latency_seconds_count{model="tiny"}') == 4


async def test_many_requests_share_one_session(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    request = api.GenerateRequest(generation=asking(n=3).generation)
    answers = await asyncio.gather(*(quire.stub.Generate(request) for _ in range(50)))
    assert {one.text for answer in answers for one in answer.completions} == {"hello world"}
    assert len(quire.scheduler.sessions) == 1


async def test_the_end_may_come_with_the_stop_token_alone(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(stopping=api.Stopping(stop_token_ids=[9])))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, [9], 0, end=stop_end(9))
    _, event, usage = await consumed(call)
    assert (event.chunk.text, list(event.chunk.token_ids), event.chunk.finish.token_id) == ("", [9], 9)
    assert usage.usage.completion_tokens == 1
