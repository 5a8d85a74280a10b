"""Several models at one gateway, each with its own tokenizer, template and defaults, with a scripted scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from gateway_harness import Harness, encoded, gateway_at, reason_of, rest_of, running_gateway, scheduler_model
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler, answer_with, length_end, serving
from svc_common.models import tokenizer_fingerprint
from svc_common.protocols import SESSION_PROTOCOLS, ProtocolRange
from tiny_model import SPECIAL_TOKENS, make_model_directory, other_tokenizer

HELLO = encoded("hello")
MESSAGES = [{"role": "user", "content": "hello"}]


OTHER_HELLO = other_tokenizer().encode("hello").ids


@pytest.fixture(scope="session")
def models_file(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, and another one with a tokenizer, a template and defaults of its own."""
    root = tmp_path_factory.mktemp("several")
    make_model_directory(root / "second", other_tokenizer())
    path = root / "models.toml"
    path.write_text(
        f"""
        [[models]]
        model = "{model_directory}"
        [[models]]
        model = "second"
        served_model_name = ["other", "owner/alias", "second"]
        chat_template = "{{{{ messages[0].content }}}}"
        override_generation_config = {{ temperature = 0.5 }}
        """
    )
    return path


@pytest.fixture
def tiny(model_directory: Path) -> scheduler_v1.Model:
    """The tiny model in a status."""
    return scheduler_model(model_directory)


@pytest.fixture
def other(models_file: Path) -> scheduler_v1.Model:
    """The other model in a status."""
    directory = models_file.parent / "second"
    return scheduler_model(directory, name="other", context_length=64, vocab_size=other_tokenizer().get_vocab_size())


@asynccontextmanager
async def running(scheduler: ScriptedScheduler, models_file: Path, **settings: Any) -> AsyncIterator[Harness]:
    """A gateway of both models, ready for at least one of them."""
    async with (
        serving(scheduler),
        gateway_at(scheduler, models_file.parent, [scheduler.address], models=models_file, **settings) as harness,
    ):
        await harness.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
        yield harness


@pytest.fixture
async def both(models_file: Path, tiny: scheduler_v1.Model, other: scheduler_v1.Model) -> AsyncIterator[Harness]:
    """A gateway that is ready for both models."""
    async with running(ScriptedScheduler(tiny, other), models_file) as harness:
        yield harness


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and field of the error with which a call, unary or streaming, ends."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (rest_of(call) if hasattr(call, "read") else call)
    return (error.value.code(), *reason_of(error.value))


async def generate(quire: Harness, **fields: Any) -> api.GenerateResponse:
    return await quire.stub.Generate(api.GenerateRequest(generation=api.Generation(**fields)))


async def model_names(quire: Harness) -> list[str]:
    """Names on the cards of /v1/models."""
    return [card["id"] for card in (await quire.http.get("/v1/models")).json()["data"]]


@pytest.mark.parametrize(
    ("asked", "name", "prompt"),
    [
        (None, "tiny", HELLO),
        ("tiny", "tiny", HELLO),
        ("other", "other", OTHER_HELLO),
        ("owner/alias", "other", OTHER_HELLO),
        ("second", "other", OTHER_HELLO),
    ],
)
async def test_a_request_is_of_the_model_that_it_names_or_the_first(
    asked: str | None, name: str, prompt: list[int], both: Harness
) -> None:
    both.scheduler.script = answer_with(prompt)
    named: dict[str, Any] = {} if asked is None else {"model": asked}
    limit: dict[str, Any] = {"stopping": api.Stopping(max_tokens=len(prompt))}
    over_grpc = await generate(both, text="hello", **named, **limit)
    call = both.stub.StreamGenerate(
        api.StreamGenerateRequest(generation=api.Generation(text="hello", **named, **limit))
    )
    acceptance, *chunks, _ = await rest_of(call)
    body = {"prompt": "hello", "max_tokens": len(prompt), **named}
    over_http = (await both.http.post("/v1/completions", json=body)).json()
    streamed = (await both.http.post("/v1/completions", json=body | {"stream": True})).text
    for submit in both.scheduler.all("submit"):
        assert (submit.model, submit.render_options.model) == (name, name)
        assert list(submit.prompt_token_ids) == prompt
    assert (over_grpc.acceptance.model, over_grpc.completions[0].text) == (name, "hello")
    assert acceptance.acceptance.model == name
    assert "".join(event.chunk.text for event in chunks) == "hello"
    assert (over_http["model"], over_http["choices"][0]["text"]) == (name, "hello")
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert {event["model"] for event in events} == {name}
    assert "".join(event["choices"][0]["text"] for event in events) == "hello"


async def test_template_and_defaults_are_those_of_the_model(both: Harness) -> None:
    both.scheduler.script = answer_with([5])
    for name in ("tiny", "other"):
        response = await both.http.post("/v1/chat/completions", json={"model": name, "messages": MESSAGES})
        assert response.status_code == 200
    first, second = both.scheduler.all("submit")
    assert first.prompt_token_ids[0] == SPECIAL_TOKENS.index("<|im_start|>")
    assert list(second.prompt_token_ids) == OTHER_HELLO
    assert (first.sampling.temperature, second.sampling.temperature) == (1, 0.5)


async def test_the_context_is_that_of_the_model(both: Harness) -> None:
    both.scheduler.script = answer_with([5])
    assert await generate(both, text="a" * 100, model="tiny")
    code, reason, _ = await refused(generate(both, text="a" * 100, model="other"))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")


async def test_an_alias_and_the_name_are_the_same_request(both: Harness) -> None:
    both.scheduler.script = answer_with([5])
    for name in ("other", "owner/alias", "tiny"):
        assert await generate(both, token_ids=api.TokenIds(ids=[5]), model=name, request_id="mine")
    first, again, different = (submit.body_digest for submit in both.scheduler.all("submit"))
    assert first == again != different


async def test_an_unknown_model_is_refused_with_those_that_are_served(both: Harness) -> None:
    for call, field in (
        (generate(both, text="a", model="gpt"), "generation.model"),
        (both.stub.Tokenize(api.TokenizeRequest(text="a", model="gpt")), "model"),
    ):
        assert await refused(call) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", field)
    posted = await both.http.post("/v1/completions", json={"prompt": "a", "model": "gpt"})
    for response in (posted, await both.http.get("/v1/models/gpt")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "there is tiny, other" in error["message"]


async def test_models_are_listed_with_their_aliases(
    both: Harness, tiny: scheduler_v1.Model, other: scheduler_v1.Model
) -> None:
    listed = (await both.stub.ListModels(api.ListModelsRequest())).models
    assert list(listed) == [
        api.Model(name="tiny", context_length=tiny.context_length, vocab_size=tiny.vocab_size),
        api.Model(name="other", context_length=64, vocab_size=other.vocab_size, aliases=["owner/alias", "second"]),
    ]
    cards = (await both.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
        ("tiny", "tiny", tiny.context_length),
        ("other", "other", 64),
        ("owner/alias", "other", 64),
        ("second", "other", 64),
    ]
    assert [(await both.http.get(f"/v1/models/{card['id']}")).json() for card in cards] == cards


async def test_text_and_tokens_are_those_of_the_model(both: Harness) -> None:
    for name, token_ids in ((None, HELLO), ("tiny", HELLO), ("second", OTHER_HELLO)):
        tokenized = await both.stub.Tokenize(api.TokenizeRequest(text="hello", model=name))
        assert list(tokenized.token_ids) == token_ids
        detokenized = await both.stub.Detokenize(api.DetokenizeRequest(token_ids=token_ids, model=name))
        assert detokenized.text == "hello"
    last = other_tokenizer().get_vocab_size()
    assert await both.stub.Detokenize(api.DetokenizeRequest(token_ids=[last], model="tiny"))
    assert (await refused(both.stub.Detokenize(api.DetokenizeRequest(token_ids=[last], model="other"))))[1:] == (
        "INVALID_FIELD",
        "token_ids[0]",
    )


async def test_a_model_that_is_not_ready_leaves_the_other_alone(
    models_file: Path, tiny: scheduler_v1.Model, other: scheduler_v1.Model
) -> None:
    async with running(ScriptedScheduler(other), models_file) as quire:
        quire.scheduler.script = answer_with([5])
        assert (await quire.http.get("/health")).status_code == 200
        assert await model_names(quire) == ["other", "owner/alias", "second"]
        assert [model.name for model in (await quire.stub.ListModels(api.ListModelsRequest())).models] == ["other"]
        assert await generate(quire, text="a", model="other")
        for fields in ({"text": "a"}, {"text": "a", "model": "tiny"}):
            assert (await refused(generate(quire, **fields)))[:2] == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY")
        refusal = await quire.http.get("/v1/models/tiny")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "model_not_ready")
        assert int(refusal.headers["retry-after"]) >= 1

        quire.scheduler.session.status(other, tiny)
        async with asyncio.timeout(60):
            while "tiny" not in await model_names(quire):
                await asyncio.sleep(0.01)
        assert (await generate(quire, text="a")).acceptance.model == "tiny"
        quire.scheduler.session.status(tiny)
        async with asyncio.timeout(60):
            while await model_names(quire) != ["tiny"]:
                await asyncio.sleep(0.01)
        assert await generate(quire, text="a")
        assert (await refused(generate(quire, text="a", model="second")))[1] == "MODEL_NOT_READY"


async def test_a_stream_continues_while_its_model_is_not_ready(both: Harness, tiny: scheduler_v1.Model) -> None:
    call = both.stub.StreamGenerate(
        api.StreamGenerateRequest(generation=api.Generation(text="a", model="other", request_id="mine"))
    )
    submit = await both.scheduler.next("submit")
    both.scheduler.session.accept(submit.key)
    await call.read()
    both.scheduler.session.status(tiny)
    async with asyncio.timeout(60):
        while await model_names(both) != ["tiny"]:
            await asyncio.sleep(0.01)
    both.scheduler.session.tokens(submit.key, OTHER_HELLO, 0, end=length_end())
    *chunks, _ = await rest_of(call)
    assert "".join(event.chunk.text for event in chunks) == "hello"


async def test_a_model_with_another_tokenizer_at_its_workers_is_not_ready(
    models_file: Path, model_directory: Path, tiny: scheduler_v1.Model, other: scheduler_v1.Model
) -> None:
    other.tokenizer_fingerprint = tokenizer_fingerprint(model_directory)
    async with running(ScriptedScheduler(other, tiny), models_file) as quire:
        assert await model_names(quire) == ["tiny"]


def resume(quire: Harness) -> Any:
    return quire.stub.Resume(api.ResumeRequest(request_id="mine"))


async def kept(quire: Harness, model: str) -> scheduler_v1.Submit:
    """A request that has ended, and is returned to each later Attach."""
    quire.scheduler.script = answer_with(OTHER_HELLO)
    stopping = api.Stopping(max_tokens=len(OTHER_HELLO))
    await generate(quire, text="hello", model=model, request_id="mine", stopping=stopping)
    (submit,) = quire.scheduler.all("submit")
    assert isinstance(submit, scheduler_v1.Submit)
    return submit


async def test_what_is_gone_on_with_is_of_its_own_model(both: Harness) -> None:
    submit = await kept(both, "owner/alias")
    record = scheduler_v1.Tokens(token_ids=OTHER_HELLO, end=length_end())
    both.scheduler.attach_script = lambda session, attach: session.attached(submit, record)
    acceptance, *chunks, _ = await rest_of(resume(both))
    assert acceptance.acceptance.model == "other"
    assert "".join(event.chunk.text for event in chunks) == "hello"


async def test_a_request_of_a_model_that_is_not_here_is_for_another_gateway(
    both: Harness, model_directory: Path
) -> None:
    submit = await kept(both, "other")
    async with running_gateway(model_directory) as lacking:
        lacking.scheduler.attach_script = lambda session, attach: session.attached(submit)
        lacking.scheduler.script = answer_with(HELLO)
        call = resume(lacking)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest_of(call)
        assert (error.value.code(), reason_of(error.value)[0]) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY")
        assert "other" in str(error.value.details())
        # Another gateway can continue it.
        assert (await lacking.scheduler.next("detach")).key == submit.key
        assert not lacking.scheduler.all("cancel")
        assert (await generate(lacking, text="hello")).completions
        assert await lacking.metric('quire_gateway_requests_in_flight{model="tiny"}') == 0


async def test_a_scheduler_of_protocol_1_serves_its_one_model(
    models_file: Path, tiny: scheduler_v1.Model, other: scheduler_v1.Model
) -> None:
    async with running(ScriptedScheduler(other, protocols=None), models_file) as quire:
        quire.scheduler.script = answer_with([5])
        assert await model_names(quire) == ["other", "owner/alias", "second"]
        assert (await generate(quire, text="a", model="second")).acceptance.model == "other"
        assert [command.WhichOneof("command") for command in quire.scheduler.commands] == ["submit"]
        with pytest.raises(grpc.aio.AioRpcError, match="release") as error:  # it would ignore the constraint
            await generate(quire, text="a", model="second", constraint=api.Constraint(regex="a+"))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        quire.scheduler.session.status(tiny)
        async with asyncio.timeout(60):
            while await model_names(quire) != ["tiny"]:
                await asyncio.sleep(0.01)


async def test_a_scheduler_without_a_common_protocol_is_left_for_one_that_fits(
    models_file: Path, tiny: scheduler_v1.Model, other: scheduler_v1.Model
) -> None:
    newest = SESSION_PROTOCOLS.newest
    stranger = ScriptedScheduler(tiny, other, protocols=ProtocolRange(newest + 1, newest + 2))
    fitting = ScriptedScheduler(tiny, other)
    fitting.is_leader = False
    async with serving(stranger), serving(fitting):
        addresses = [stranger.address, fitting.address]
        async with gateway_at(fitting, models_file.parent, addresses, models=models_file) as quire:
            await stranger.joined(2)
            assert (await quire.http.get("/health")).status_code == 503
            assert (await refused(generate(quire, text="a")))[1] == "MODEL_NOT_READY"
            fitting.is_leader = True
            await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
            fitting.script = answer_with([5])
            assert await generate(quire, text="a", model="other")
        assert fitting.commands[0].hello.protocol == newest
        assert not stranger.commands


async def test_metrics_are_by_model_and_never_by_what_clients_make_up(both: Harness) -> None:
    both.scheduler.script = answer_with([5, 6])
    await generate(both, text="a", model="owner/alias", stopping=api.Stopping(max_tokens=2))
    await both.http.post("/v1/completions", json={"prompt": "a", "model": "second", "max_tokens": 2})
    await both.http.post("/v1/completions", json={"prompt": "a", "model": "evil"})
    await refused(generate(both, text="a", model="evil"))
    page = (await both.http.get("/metrics")).text
    assert "evil" not in page
    assert "alias" not in page
    for name, value in (("generation_tokens_total", 4), ("prompt_tokens_total", 2), ("requests_in_flight", 0)):
        assert await both.metric(f'quire_gateway_{name}{{model="other"}}') == value
    assert await both.metric('quire_gateway_time_to_first_token_seconds_count{model="other"}') == 2
    labels = 'code="200",method="/v1/completions",model="other",protocol="http"'
    assert await both.metric(f"quire_gateway_requests_total{{{labels}}}") == 1
    labels = 'code="404",method="/v1/completions",model="",protocol="http"'
    assert await both.metric(f"quire_gateway_requests_total{{{labels}}}") == 1


async def test_gateways_with_other_defaults_take_a_request_for_the_same(model_directory: Path) -> None:
    digests = []
    for override in (None, '{"temperature": 0.5, "top_k": 3, "max_new_tokens": 7}', '{"temperature": 0}'):
        async with running_gateway(model_directory, override_generation_config=override) as quire:
            quire.scheduler.script = answer_with([5])
            await generate(quire, text="a", request_id="mine")
            await quire.http.post("/v1/completions", json={"prompt": "a"}, headers={"Idempotency-Key": "other"})
            digests.append([submit.body_digest for submit in quire.scheduler.all("submit")])
    assert digests[0] == digests[1] == digests[2]
    assert digests[0][0] != digests[0][1], "a completion has 16 tokens by default"
