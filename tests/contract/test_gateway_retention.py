"""How long a request's record is kept, as its client asks for it and is answered."""

from pathlib import Path
from typing import Any

import pytest

from gateway_calls import asking, refused
from gateway_harness import Harness, encoded, reason_of, running_gateway
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedSession, answer_with, length_end
from tiny_model import EOS

NONE = scheduler_v1.Retention(is_unrecorded=True)
UNTIL_END = scheduler_v1.Retention()
MINUTE = scheduler_v1.Retention(seconds=60)
ASKED = [
    (api.Retention(none=api.NotRecorded()), "none", NONE),
    (api.Retention(until_end=api.UntilEnd()), "until_end", UNTIL_END),
    (api.Retention(seconds=60), 60, MINUTE),
]


async def submitted(quire: Harness) -> scheduler_v1.Submit:
    submit = await quire.scheduler.next("submit")
    assert isinstance(submit, scheduler_v1.Submit)
    return submit


async def test_a_request_asks_for_it_over_either_protocol(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    for message, value, expected in ASKED:
        for name in ("mine", None):
            generation = asking(retention=message, request_id=name).generation
            await quire.stub.Generate(api.GenerateRequest(generation=generation))
            submit = await submitted(quire)
            assert (submit.retention, submit.HasField("retention"), submit.detachable) == (expected, True, bool(name))
            headers = {"Idempotency-Key": name} if name else {}
            body = {"prompt": "hello", "retention": value}
            assert (await quire.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            assert (await submitted(quire)).retention == expected


async def test_without_it_the_operators_defaults_apply(quire: Harness, model_directory: Path) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    await quire.http.post("/v1/completions", json={"prompt": "hello"})
    assert (await submitted(quire)).retention == UNTIL_END
    await quire.http.post("/v1/completions", json={"prompt": "hello"}, headers={"Idempotency-Key": "mine"})
    assert not (await submitted(quire)).HasField("retention")  # the scheduler's QUIRE_RECORD_TTL
    async with running_gateway(model_directory, named_retention="60", unnamed_retention="none") as other:
        other.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
        await other.http.post("/v1/completions", json={"prompt": "hello"})
        assert (await submitted(other)).retention == NONE
        await other.http.post("/v1/completions", json={"prompt": "hello"}, headers={"Idempotency-Key": "mine"})
        assert (await submitted(other)).retention == MINUTE


async def test_a_key_has_a_default_and_a_maximum(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "the-own-key-of-alice"\ntenant = "alice"\nretention = "none"\n')
    bearer = {"Authorization": "Bearer the-own-key-of-alice"}
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
        for name in ({}, {"Idempotency-Key": "mine"}):
            await quire.http.post("/v1/completions", json={"prompt": "hello"}, headers=bearer | name)
            assert (await submitted(quire)).retention == NONE
        body = {"prompt": "hello", "retention": "until_end"}
        error = (await quire.http.post("/v1/completions", json=body, headers=bearer)).json()["error"]
        assert (error["param"], error["code"]) == ("retention", "invalid_field")


async def test_it_does_not_distinguish_requests(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    digests = set()
    for message in (None, *(message for message, _, _ in ASKED)):
        await quire.stub.Generate(api.GenerateRequest(generation=asking(retention=message).generation))
        digests.add((await submitted(quire)).body_digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (api.Retention(), "must be none, until_end, or at least 1 second"),
        (api.Retention(seconds=0), "must be none, until_end, or at least 1 second"),
        (api.Retention(seconds=3601), "must be at most 3600 seconds"),
    ],
)
async def test_a_bad_one_is_named_over_grpc(quire: Harness, message: api.Retention, problem: str) -> None:
    error = await refused(quire.stub.StreamGenerate(asking(retention=message)))
    assert reason_of(error) == ("INVALID_FIELD", "generation.retention")
    assert problem in str(error.details())


@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, "60", "", [], {}, 3601, 2**70])
async def test_a_bad_one_is_named_over_http(quire: Harness, value: Any) -> None:
    for route, prompt in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = await quire.http.post(f"/v1/{route}", json={**prompt, "retention": value})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "retention", "invalid_field")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_over_http_has_whether_its_requests_are_recorded(quire: Harness, stream: bool) -> None:
    body = {"prompt": ["hello", "hello"], "stream": stream}
    for recorded in ([True, True], [True, False], [False, False]):
        left = list(recorded)

        def answer(session: ScriptedSession, submit: scheduler_v1.Submit, left: list[bool] = left) -> None:
            session.accept(submit.key, is_durable=left.pop())
            session.tokens(submit.key, encoded("hello"), 0, end=length_end())

        quire.scheduler.script = answer
        response = await quire.http.post("/v1/completions", json=body)
        assert response.headers["x-request-durable"] == str(all(recorded)).lower()
    response = await quire.http.post("/v1/completions", json={})
    assert "x-request-durable" not in response.headers


async def test_the_answer_to_an_attach_has_whether_the_request_is_recorded(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    await quire.http.post("/v1/completions", json={"prompt": "hello"}, headers={"Idempotency-Key": "mine"})
    submit = await submitted(quire)
    for sent, is_durable in ((False, False), (True, True), (None, True)):  # None: a scheduler of the release before
        call = quire.stub.Resume(api.ResumeRequest(request_id="mine"))
        attach = await quire.scheduler.next("attach")
        assert attach.key == submit.key
        quire.scheduler.session.attached(submit, is_durable=sent)
        acceptance = await call.read()
        assert isinstance(acceptance, api.ResumeResponse)
        assert acceptance.acceptance.is_durable is is_durable
        call.cancel()
