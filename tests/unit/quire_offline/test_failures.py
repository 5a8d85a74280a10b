"""A step that fails is computed again; a device that fails ends the model."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire_client.batch.lines import BatchError
from quire_offline import LLM, LoadError, QuireError, SamplingParams
from quire_offline.http_transport import EngineTransport
from worker_svc.errors import DeviceLost

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + number] * (3 + number) for number in range(10)]


def fail_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Lets the fifth step from now on raise."""
    instance = llm._thread.engine._worker._instance
    assert instance is not None
    launch, num_steps = instance.runner.launch, 0

    def launch_or_raise(step: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise error
        return launch(step)

    monkeypatch.setattr(instance.runner, "launch", launch_or_raise)


def test_sequences_of_a_step_that_fails_continue(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(num_blocks=64)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    fail_once(llm, monkeypatch, RuntimeError("a bug"))
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected


def test_calls_fail_when_the_device_does(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(num_blocks=64)
    fail_once(llm, monkeypatch, DeviceLost("an illegal access"))
    for _ in range(2):
        with pytest.raises(QuireError, match="the device failed in a step") as raised:
            llm.generate(PROMPTS, PARAMS)
        assert raised.value.reason == "INTERNAL"


def complete(llm: LLM) -> None:
    """Completes the prompts by the HTTP API, as a batch does. Raises BatchError."""
    body = json.dumps({"prompt": PROMPTS, "max_tokens": 12, "ignore_eos": True}).encode()

    async def run() -> None:
        transport = EngineTransport(llm._thread.engine)
        try:
            async with asyncio.timeout(60):
                await transport.call("POST", "/v1/completions", {"content-type": "application/json"}, body)
        finally:
            transport.close()

    llm._thread.run(run())


def bug(*_: object) -> None:
    raise RuntimeError("a bug")


def test_calls_of_a_batch_fail_when_the_engine_does(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(num_blocks=64)
    monkeypatch.setattr(llm._thread.engine._scheduler, "schedule", bug)
    for _ in range(2):
        with pytest.raises(BatchError, match="the engine failed: RuntimeError"):
            complete(llm)


def test_a_call_fails_whose_prompts_are_submitted_when_the_engine_fails(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(num_blocks=64)
    engine = llm._thread.engine
    submitted: list[int] = []

    class FailureBeforeTheThird:
        async def before_prompt(self, num_tokens: int) -> None:
            submitted.append(num_tokens)
            if len(submitted) == 3:
                monkeypatch.setattr(engine._scheduler, "schedule", bug)
                engine._fail(RuntimeError("a bug"))

    monkeypatch.setattr("gateway_svc.request_manager.LoopYield", FailureBeforeTheThird)
    with pytest.raises(BatchError, match="the engine failed: RuntimeError"):
        complete(llm)
    assert submitted == [3, 4, 5]


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("chat_template", "{{ x", "^chat_template does not parse as a Jinja template: "),
        ("override_generation_config", {"temprature": 1}, "^override_generation_config: temprature is not one of "),
        ("tool_format", "foo", "^tool_format: foo is not one of "),
        ("drafter", "foo", "^drafter is foo; known drafters are "),
        ("max_model_len", 10**6, "^max_model_len is 1000000, but the context length of the model is 256 tokens"),
        ("device", "cuda", "^device is cuda, but torch finds no GPU$"),
    ],
)
def test_a_value_that_is_not_usable_is_named_by_its_argument(
    argument: str, value: Any, text: str, load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=text) as raised:
        load(**{argument: value})
    assert type(raised.value) is LoadError
    assert raised.value.__cause__ is not None
