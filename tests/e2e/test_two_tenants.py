"""Attacks of one tenant on another, through the gateways of a deployment of real processes.

Alice attacks Bob. Each attack is also made with Bob's own key, or on Alice's own request, where it has an effect.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployment import Deployment, deployment
from inner_calls import TIMEOUT
from quire_client import AsyncClient, AsyncStream, QuireError
from tiny_model import make_model_directory

ALICE, BOB = "the-own-key-of-alice", "the-own-key-of-bob"
KEYS = "".join(f'[[keys]]\nkey = "{key}"\ntenant = "{key.rpartition("-")[2]}"\n' for key in (ALICE, BOB))
MODEL = "tiny"
NUM_SLOTS = 8
LONG = 1000  # tokens of requests that must still run when they are attacked: some seconds
PROMPT = list(range(40, 200))  # ten blocks
SECRET = "the salary of Bob is 12345"


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two gateways and a worker, for the tenants of two keys. Equal requests have equal tokens."""
    directory = tmp_path_factory.mktemp("tenants")
    keys = directory / "keys.toml"
    keys.write_text(KEYS)
    settings: dict[str, str | int] = {
        "model": str(tiny_model),
        "served_model_name": MODEL,
        "tokenizer": str(make_model_directory(directory / "tokenizer")),
        "api_keys": str(keys),
        "max_sequences": NUM_SLOTS,
        "num_blocks": 2000,
        "num_threads": 1,
        "deterministic": 1,
        "log_level": "debug",
    }
    with deployment(**settings, gateways=2) as started:
        yield started


@asynccontextmanager
async def quire(
    running: Deployment, key: str, gateway: int = 0, timeout: float = TIMEOUT
) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.state["grpc"][gateway], api_key=key, timeout=timeout) as client:
        yield client


@asynccontextmanager
async def official(
    running: Deployment, key: str, gateway: int = 0, timeout: float = TIMEOUT
) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    url = f"http://{running.state['http'][gateway]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout) as client:
        yield client


@contextmanager
def worker_held(running: Deployment) -> Iterator[None]:
    """The worker computes nothing, so that no request ends before it was attacked."""
    running.kill("worker", signal.SIGSTOP)
    try:
        yield
    finally:
        running.kill("worker", signal.SIGCONT)


def long_stream(client: AsyncClient, name: str, **fields: Any) -> AsyncStream:
    options: Any = {"max_tokens": LONG, "seed": 3, "ignore_eos": True, "request_id": name} | fields
    return client.stream(PROMPT, **options)


async def first_tokens(stream: AsyncStream) -> tuple[list[int], AsyncIterator[Any]]:
    """The first tokens of a stream, and the rest of its chunks."""
    chunks = aiter(stream)
    return list((await anext(chunks)).token_ids), chunks


async def rest_of(tokens: list[int], chunks: AsyncIterator[Any]) -> list[int]:
    async for chunk in chunks:
        tokens += chunk.token_ids
    return tokens


async def error_of(call: Callable[[str], Awaitable[Any]], name: str) -> tuple[Any, ...]:
    """Everything that the error of a call shows, with the request's name replaced."""
    with pytest.raises((QuireError, openai.APIStatusError)) as raised:
        await call(name)
    error = raised.value
    if not isinstance(error, openai.APIStatusError):
        assert isinstance(error, QuireError)
        return error.code, error.reason, str(error).replace(name, "NAME")
    own = ("date", "x-request-id")  # the id is the caller's own name for the request, or a random one
    headers = {(header, value) for header, value in error.response.headers.items() if header not in own}
    return error.status_code, error.response.text.replace(name, "NAME"), frozenset(headers)


def check_live(running: Deployment, name: str) -> None:
    """Fails unless a request of Bob's runs or waits."""
    with running.admin() as admin:
        assert admin.explain(name, tenant="bob").num_prompt_tokens


# Cancelled.


async def test_a_request_runs_on_when_another_tenant_cancels_its_name(running: Deployment) -> None:
    async with quire(running, BOB) as bob, quire(running, ALICE) as alice, quire(running, ALICE, 1) as there:
        expected = list((await long_stream(bob, "before").collect()).token_ids)
        tokens, chunks = await first_tokens(long_stream(bob, "cancelled"))
        with worker_held(running):
            for attacker in (alice, there):
                await attacker.cancel("cancelled")
            check_live(running, "cancelled")
        # A request of the same name that its own client leaves is cancelled, too.
        async with official(running, ALICE) as client:
            left = await client.completions.create(
                model=MODEL, prompt=PROMPT, stream=True, extra_headers={"Idempotency-Key": "cancelled"}
            )
            await left.close()
        await alice.cancel("cancelled")
        check_live(running, "cancelled")
        assert await rest_of(tokens, chunks) == expected


async def test_a_request_ends_when_its_own_tenant_cancels_its_name(running: Deployment) -> None:
    async with quire(running, BOB) as bob, quire(running, BOB, 1) as there:
        tokens, chunks = await first_tokens(long_stream(bob, "own"))
        with worker_held(running):
            await there.cancel("own")
        with pytest.raises(QuireError) as raised:
            await rest_of(tokens, chunks)
        assert raised.value.reason == "CANCELLED"


# Seen, resumed.


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_name_of_another_tenant_is_as_unknown_as_one_that_never_was(
    running: Deployment, has_ended: bool
) -> None:
    name = f"resumed-{has_ended}"
    async with quire(running, BOB) as bob, AsyncExitStack() as stack:
        tokens, chunks = await first_tokens(long_stream(bob, name))
        if has_ended:
            await rest_of(tokens, chunks)
        attacked = stack.enter_context(ExitStack())
        if not has_ended:
            attacked.enter_context(worker_held(running))
        for gateway in range(2):
            alice = await stack.enter_async_context(quire(running, ALICE, gateway))
            client = await stack.enter_async_context(official(running, ALICE, gateway))

            async def by_grpc(name: str, alice: AsyncClient = alice) -> None:
                await alice.resume(name, {0: 1}).collect()

            async def by_http(name: str, client: openai.AsyncOpenAI = client) -> None:
                headers = {"Idempotency-Key": name, "Last-Event-ID": "1"}
                await client.completions.create(
                    model=MODEL,
                    prompt=PROMPT,
                    stream=True,
                    max_tokens=LONG,
                    seed=3,
                    extra_body={"ignore_eos": True},
                    extra_headers=headers,
                )

            for attack in (by_grpc, by_http):
                assert await error_of(attack, name) == await error_of(attack, "x" * len(name))
        if not has_ended:
            check_live(running, name)
        attacked.close()
        await rest_of(tokens, chunks)
        async with quire(running, BOB, 1) as there:
            assert list((await there.resume(name, {0: 1}).collect()).token_ids) == tokens[1:]


async def test_a_tenant_uses_the_names_of_another_without_a_collision(running: Deployment) -> None:
    async with quire(running, BOB) as bob, quire(running, ALICE) as alice, quire(running, BOB, 1) as there:
        tokens, chunks = await first_tokens(long_stream(bob, "shared"))
        own = await alice.generate(PROMPT[:20], max_tokens=30, seed=4, ignore_eos=True, request_id="shared")
        assert len(own.token_ids) == 30
        with pytest.raises(QuireError) as raised:
            await there.generate(PROMPT[:20], max_tokens=30, seed=4, ignore_eos=True, request_id="shared")
        assert raised.value.reason == "IDEMPOTENCY_KEY_REUSED"
        assert (await alice.resume("shared").collect()).token_ids == own.token_ids
        expected = await rest_of(tokens, chunks)
        assert list((await there.resume("shared").collect()).token_ids) == expected
        assert len(expected) == LONG


Attack = Callable[[openai.AsyncOpenAI, str], Awaitable[Any]]
ATTACKS: dict[str, Attack] = {
    "retrieve": lambda client, name: client.responses.retrieve(name),
    "stream": lambda client, name: client.responses.retrieve(name, stream=True),
    "cancel": lambda client, name: client.responses.cancel(name),
    "delete": lambda client, name: client.responses.delete(name),
    "input items": lambda client, name: client.get(f"/responses/{name}/input_items", cast_to=httpx.Response),
    "continue": lambda client, name: client.responses.create(
        model=MODEL, input="What did I ask before?", previous_response_id=name
    ),
}


async def background(client: openai.AsyncOpenAI, key: str, text: str = SECRET) -> str:
    """Starts a long response, and returns its id."""
    created = await client.responses.create(
        model=MODEL,
        input=text,
        background=True,
        max_output_tokens=LONG,
        extra_body={"ignore_eos": True, "seed": 5},
        extra_headers={"Idempotency-Key": key},
    )
    return created.id


async def ended(client: openai.AsyncOpenAI, response_id: str) -> dict[str, Any]:
    """A response once it has ended."""
    async with asyncio.timeout(TIMEOUT):
        while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
    return response.to_dict()


@pytest.mark.parametrize("gateway", [0, 1])
async def test_a_response_of_another_tenant_is_not_found_and_runs_on(running: Deployment, gateway: int) -> None:
    async with official(running, BOB) as bob, official(running, ALICE, gateway) as alice:
        name, never = await background(bob, f"report-{gateway}"), f"resp_{'0' * 48}"
        for is_over in (False, True):
            with nullcontext() if is_over else worker_held(running):
                for what, attack in ATTACKS.items():
                    found = await error_of(partial(attack, alice), name)
                    assert found == await error_of(partial(attack, alice), never), what
                    assert found[0] == 404
                    assert SECRET not in found[1]
                if not is_over:
                    check_live(running, name)
            response = await ended(bob, name)
        assert response["usage"]["output_tokens"] == LONG
        assert [item async for item in bob.responses.input_items.list(name)]


async def test_a_response_under_the_same_idempotency_key_is_each_tenants_own(running: Deployment) -> None:
    """The key decides the id of the response, so a tenant can guess that of another."""
    async with official(running, BOB) as bob, official(running, ALICE) as alice:
        name = await background(bob, "daily")
        assert await background(alice, "daily", "Something else") == name
        items: Any = [item async for item in alice.responses.input_items.list(name)]
        assert [item.content[0].text for item in items] == ["Something else"]
        await alice.responses.cancel(name)
        await alice.responses.delete(name)
        response = await ended(bob, name)
        assert response["usage"]["output_tokens"] == LONG


# Timed.


def num_hits(running: Deployment) -> float:
    """Tokens that were found in any prefix cache."""
    return sum(value for name, value in running.metrics().items() if name.startswith("quire_prefix_cache_hits_total"))


def num_computed(running: Deployment) -> float:
    """Tokens of prompts that the worker has computed."""
    return running.metrics("worker_metrics")['quire_worker_tokens_total{kind="prefill"}']


async def test_a_prompt_of_another_tenant_is_computed_as_one_that_nobody_has_sent(running: Deployment) -> None:
    prompt = [*range(200, 260), *range(5, 95)]
    async with quire(running, BOB) as bob, quire(running, ALICE) as alice, official(running, ALICE, 1) as client:
        first, second = [await bob.generate(prompt, max_tokens=1) for _ in range(2)]
        assert first.usage.cached_tokens == 0 < second.usage.cached_tokens, "there is nothing to find"
        hits, computed = num_hits(running), num_computed(running)
        assert (await alice.generate(prompt, max_tokens=1)).usage.cached_tokens == 0
        assert (num_hits(running), num_computed(running)) == (hits, computed + len(prompt))
        other = [5, *prompt[1:]]  # of which Bob has sent nothing, and nobody anything
        assert (await alice.generate(other, max_tokens=1)).usage.cached_tokens == 0
        assert (num_hits(running), num_computed(running)) == (hits, computed + 2 * len(prompt))
        answer = await client.completions.create(model=MODEL, prompt=[6, *prompt[1:]], max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        for is_cached in (False, True):  # a tenant divides its own cache, and reaches no other one
            answer = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "bob"}
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert bool(answer.usage.prompt_tokens_details.cached_tokens) is is_cached


async def test_a_prompt_that_another_tenant_computes_now_is_not_waited_for(running: Deployment) -> None:
    """Of one tenant, the second of two equal prompts waits for the blocks of the first one."""
    prompt = [*range(100, 200)] * 15
    for key, is_cached in ((BOB, True), (ALICE, False)):
        async with quire(running, BOB) as bob, quire(running, key) as other:
            prompt = [prompt[0] + 1, *prompt[1:]]
            generations = await asyncio.gather(*(each.generate(prompt, max_tokens=1) for each in (bob, other)))
        assert any(each.usage.cached_tokens > 0 for each in generations) == is_cached


# Starved.

FLOOD = 240  # requests
FLOOD_TOKENS = (2000, 2500, 3000)  # of each
FLOOD_TIMEOUT = 1200.0  # seconds
NUM_TRIES = 20
SETTLE = 0.05  # seconds in which a client sees that a request has ended


async def test_a_flood_yields_a_slot_to_another_tenant_before_a_request_of_it_ends(running: Deployment) -> None:
    """Some requests of the flood end by themselves while another tenant's waits, so there are several tries."""

    def options(number: int) -> dict[str, Any]:
        return {"max_tokens": FLOOD_TOKENS[number % 3], "priority": -(number % 2)}

    async def flood(alice: AsyncClient, number: int) -> None:
        await alice.generate([5 + number, 6, 7], ignore_eos=True, **options(number))

    async def flood_by_http(alice: openai.AsyncOpenAI, number: int) -> None:
        body = options(number) | {"ignore_eos": True}
        await alice.completions.create(model=MODEL, prompt=[5 + number, 6, 7], extra_body=body)

    async def chat(gateway: int) -> None:
        """Reads the first token of a chat by gRPC, and a completion by HTTP."""
        async with quire(running, BOB, gateway) as bob, official(running, BOB, gateway) as client:
            messages = [{"role": "user", "content": "hello"}]
            async with bob.stream_chat(messages, max_tokens=3, ignore_eos=True) as stream:
                await anext(aiter(stream))
            answer = await client.completions.create(model=MODEL, prompt="hello", max_tokens=3)
            assert answer.usage is not None

    async with AsyncExitStack() as stack:
        calls: list[Awaitable[None]] = []
        for gateway in range(2):
            # No request of the flood may end by its own timeout before Bob is answered.
            alice = await stack.enter_async_context(quire(running, ALICE, gateway, timeout=FLOOD_TIMEOUT))
            client = await stack.enter_async_context(official(running, ALICE, gateway, timeout=FLOOD_TIMEOUT))
            calls += [flood(alice, number) for number in range(FLOOD * 3 // 8)]
            calls += [flood_by_http(client, number) for number in range(FLOOD // 8)]
        flooding = [asyncio.ensure_future(call) for call in calls]

        def num_ended() -> int:
            return sum(each.done() for each in flooding)

        try:
            async with asyncio.timeout(TIMEOUT):
                while running.metrics()["quire_sequences_waiting"] < FLOOD - 2 * NUM_SLOTS:
                    await asyncio.sleep(0.1)
            for number in range(NUM_TRIES):
                before = num_ended()
                await chat(number % 2)
                await asyncio.sleep(SETTLE)
                if num_ended() == before:
                    break
            else:
                raise AssertionError("no chat had an answer before a request of the flood ended")
            assert running.metrics()["quire_sequences_waiting"] > NUM_SLOTS, "the flood is over"
        finally:
            for each in flooding:
                each.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
    await running.rest()


# Shown.


async def test_logs_and_errors_contain_no_text_of_a_tenant(running: Deployment) -> None:
    """The log has all levels, and what the other tests of this module do."""
    async with official(running, BOB) as bob, official(running, ALICE) as alice:
        answer = await bob.completions.create(model=MODEL, prompt=f"{SECRET}\n", max_tokens=40, seed=1)
        with pytest.raises(openai.BadRequestError) as raised:
            await bob.completions.create(model=MODEL, prompt=SECRET, max_tokens=10**6)
        assert SECRET not in raised.value.response.text
        name = await background(bob, "secret")
        for attack in ATTACKS.values():
            assert SECRET not in (await error_of(partial(attack, alice), name))[1]
        await bob.responses.cancel(name)
    log = running.log.read_text()
    assert "bob" in log, "the log is of other processes"
    for text in (SECRET, answer.choices[0].text.strip(), ALICE, BOB):
        assert text not in log
