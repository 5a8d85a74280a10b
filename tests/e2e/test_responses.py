"""OpenAI's Responses API on the real stack, by the official client; a response survives the death of each process."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from deployment import Deployment, deployment

MODEL = "smollm2-135m-instruct"
NUM_ITEMS = 120
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": NUM_ITEMS, "maxItems": NUM_ITEMS}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def running(model: object) -> Iterator[Deployment]:
    """Two gateways. The grace of detached requests is over before a killed process is back. Tokens that no process has
    any more are computed again, as they were."""
    with deployment(gateways=2, tool_format="hermes", detach_grace=1, deterministic="true") as started:
        yield started


@asynccontextmanager
async def client_of(running: Deployment, gateway: int) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{running.state['http'][gateway]}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


async def events_of(stream: Any) -> list[dict[str, Any]]:
    return [event.to_dict() async for event in stream]


@pytest.mark.parametrize("namespace", [None, "maps"])
async def test_a_conversation_with_a_call(namespace: str | None, running: Deployment) -> None:
    tools: list[Any] = [WEATHER if namespace is None else {"type": "namespace", "name": namespace, "tools": [WEATHER]}]
    async with client_of(running, 0) as here, client_of(running, 1) as there:
        first = await here.responses.create(
            model=MODEL,
            input="What is the weather in Paris?",
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=200,
            temperature=0,
        )
        [call] = [item for item in first.output if item.type == "function_call"]
        assert (call.name, call.namespace) == ("get_weather", namespace)
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 20 degrees."}
        stream = await there.responses.create(
            model=MODEL, input=[output], previous_response_id=first.id, max_output_tokens=40, temperature=0, stream=True
        )
        events = await events_of(stream)
        response = events[-1]["response"]
        assert response["status"] in ("completed", "incomplete")
        items = [item.to_dict() async for item in here.responses.input_items.list(response["id"], order="asc")]
        assert [item["type"] for item in items] == ["message", "function_call", "function_call_output"]
        after: Any = {"starting_after": 3}
        assert await events_of(await here.responses.retrieve(response["id"], stream=True, **after)) == events[4:]
        assert (await here.responses.retrieve(response["id"])).to_dict()["output"] == response["output"]
        await here.responses.delete(response["id"])
        with pytest.raises(openai.NotFoundError):
            await there.responses.retrieve(response["id"])


async def test_a_background_response_is_cancelled_on_another_gateway(running: Deployment) -> None:
    form: Any = {"type": "json_schema", "name": "list", "schema": LIST}
    async with client_of(running, 0) as here, client_of(running, 1) as there:
        created = await here.responses.create(model=MODEL, input="A list", background=True, text={"format": form})
        assert created.status == "queued"
        cancelled = await there.responses.cancel(created.id)
        assert cancelled.status == "cancelled"
        assert (await here.responses.retrieve(created.id)).status == "cancelled"
    await running.rest()


class Follower:
    """Reads the events of a response, and continues after the latest one whenever the stream ends early: at the other
    gateway."""

    def __init__(self, running: Deployment, response_id: str) -> None:
        self.received: list[dict[str, Any]] = []
        self.gateway = 0
        self._running = running
        self._response_id = response_id

    async def follow(self) -> None:
        while not self.received or self.received[-1]["type"] not in ("response.completed", "response.incomplete"):
            after: Any = {"starting_after": self.received[-1]["sequence_number"]} if self.received else {}
            try:
                async with client_of(self._running, self.gateway) as client:
                    async for event in await client.responses.retrieve(self._response_id, stream=True, **after):
                        if event.type == "error":
                            break
                        self.received.append(event.to_dict())
            except (openai.APIError, httpx.HTTPError, FileNotFoundError):  # the last: there is no supervisor
                await asyncio.sleep(0.2)
            self.gateway = 1 - self.gateway

    async def next_events(self, number: int) -> None:
        """Waits for so many events that are not the last one."""
        number += len(self.received)
        while len(self.received) < number:
            await asyncio.sleep(0.02)
            assert not self.received or self.received[-1]["type"] != "response.completed", "it is longer than that"


async def all_restarted(running: Deployment) -> None:
    """Waits until each role was restarted once and is ready."""
    while any((role["state"], role["restarts"]) != ("ready", 1) for role in running.state["roles"].values()):
        await asyncio.sleep(0.02)


async def test_a_background_response_survives_the_death_of_each_process_and_its_events_come_once(
    running: Deployment,
) -> None:
    form: Any = {"type": "json_schema", "name": "list", "schema": LIST}
    async with client_of(running, 0) as client:
        created = await client.responses.create(
            model=MODEL, input="A list of numbers.", background=True, text={"format": form}, extra_body={"seed": 1}
        )
    follower = Follower(running, created.id)
    async with asyncio.timeout(400), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follower.follow())
        # Each gateway dies while it sends the events; at the first one the response was created, too.
        await follower.next_events(10)
        first = follower.gateway
        running.kill(f"gateway-{first}")
        while follower.gateway == first:  # events that it had sent may still arrive
            await asyncio.sleep(0.02)
        await follower.next_events(10)
        running.kill(f"gateway-{1 - first}")
        for role in ("worker", "scheduler", "redis"):
            await follower.next_events(10)
            running.kill(role)
        await all_restarted(running)
        await follower.next_events(10)
        assert not following.done()
        await running.kill_supervisor()
    received = follower.received
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    assert received[-1]["type"] == "response.completed"
    text = "".join(event["delta"] for event in received if event["type"] == "response.output_text.delta")
    assert len(json.loads(text)) == NUM_ITEMS
    async with client_of(running, 1) as client:
        found = await client.responses.retrieve(created.id)
        assert (found.status, found.output_text) == ("completed", text)
        assert await events_of(await client.responses.retrieve(created.id, stream=True)) == received
