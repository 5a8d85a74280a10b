"""Single requests of asyncio programs: streams of outputs, aborts, and readers that leave."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from offline_model import SMALL
from quire_offline import AsyncLLM, QuireError, RequestOutput, RequestOutputKind, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
# As many as the context holds, six sequences each: still running when a test ends it after its first tokens.
ENDLESS = SamplingParams(temperature=0.5, max_tokens=240, n=6, ignore_eos=True)
TWO = SamplingParams(temperature=0.5, max_tokens=240, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[AsyncLLM]:
    served = AsyncLLM(str(model), **SMALL, num_blocks=64)
    yield served
    served.shutdown()


async def read(llm: AsyncLLM, params: SamplingParams, request_id: str | None = None) -> list[RequestOutput]:
    return [output async for output in llm.generate("hello", params, request_id)]


async def until_idle(llm: AsyncLLM) -> None:
    core = next(iter(llm._thread.engine._scheduler.models)).core
    async with asyncio.timeout(200):
        while core.num_running or core.num_queued:
            await asyncio.sleep(0.01)


async def test_outputs_grow_to_the_last_one(llm: AsyncLLM) -> None:
    outputs = await read(llm, LONG)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    whole = outputs[-1].outputs[0]
    assert (len(whole.token_ids), whole.finish_reason) == (150, "length")
    for output in outputs[:-1]:
        part = output.outputs[0]
        assert whole.text.startswith(part.text)
        assert whole.token_ids[: len(part.token_ids)] == part.token_ids


async def test_collections_are_rare_while_a_request_runs(llm: AsyncLLM) -> None:
    before = gc.get_threshold()
    async with aclosing(llm.generate("hello", LONG)) as outputs:
        await anext(outputs)
        assert gc.get_threshold()[0] == 50_000
    async with asyncio.timeout(200):
        while gc.get_threshold() != before:
            await asyncio.sleep(0.01)


async def test_outputs_may_be_what_is_new(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=60, n=2, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    (whole,) = (await read(llm, params))[-1:]
    params.output_kind = RequestOutputKind.DELTA
    outputs = await read(llm, params)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert all(output.outputs for output in outputs[:-1])
    assert len(outputs) > 2
    for sequence in whole.outputs:
        parts = [part for output in outputs for part in output.outputs if part.index == sequence.index]
        assert "".join(part.text for part in parts) == sequence.text
        assert [token for part in parts for token in part.token_ids] == sequence.token_ids
        assert [one for part in parts for one in part.logprobs or ()] == sequence.logprobs
        assert [part.finished() for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].cumulative_logprob == sequence.cumulative_logprob
    assert [output.prompt_logprobs for output in outputs if output.prompt_logprobs] == [whole.prompt_logprobs]


async def test_there_may_be_only_the_last_output(llm: AsyncLLM) -> None:
    (output,) = await read(llm, SamplingParams(temperature=0, max_tokens=60, output_kind=RequestOutputKind.FINAL_ONLY))
    assert output.finished


async def test_an_abort_ends_differences_once(llm: AsyncLLM) -> None:
    params = ENDLESS.clone()
    params.output_kind = RequestOutputKind.DELTA
    ended = []
    async for output in llm.generate("hello", params, "mine"):
        await llm.abort("mine")
        ended += [part.index for part in output.outputs if part.finished()]
    assert sorted(ended) == list(range(6))


async def test_many_requests_run_at_once(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    (alone,) = (await read(llm, params))[-1:]
    answers = await asyncio.gather(*(read(llm, params) for _ in range(30)))
    assert all(answer[-1].outputs[0].token_ids == alone.outputs[0].token_ids for answer in answers)


async def test_sequences_that_are_ranked_come_at_the_end(llm: AsyncLLM) -> None:
    (output,) = await read(llm, SamplingParams(n=1, best_of=3, temperature=2, seed=1, max_tokens=5))
    assert len(output.outputs) == 1


async def test_an_abort_ends_the_stream_with_what_there_is(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate("hello", ENDLESS, "mine"):
        outputs.append(output)
        if len(outputs) == 1:
            await llm.abort("mine")
    assert outputs[-1].finished
    assert outputs[-1].request_id == "mine"
    assert {one.finish_reason for one in outputs[-1].outputs} == {"abort"}
    assert all(len(one.token_ids) < 240 for one in outputs[-1].outputs)
    await until_idle(llm)
    await llm.abort(["mine", "unknown"])


async def test_a_request_that_has_not_begun_is_aborted(llm: AsyncLLM) -> None:
    reading = asyncio.create_task(read(llm, TWO, "mine"))
    await asyncio.sleep(0)
    await llm.abort("mine")
    outputs = await reading
    assert outputs[-1].finished
    assert [(one.index, one.finish_reason) for one in outputs[-1].outputs] == [(0, "abort"), (1, "abort")]
    assert all(len(one.token_ids) < 240 for one in outputs[-1].outputs)


async def test_a_request_that_waits_is_aborted(model: Path) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=240, n=2, ignore_eos=True, logprobs=1)
    async with AsyncLLM(str(model), **SMALL, num_blocks=64, max_sequences=ENDLESS.values["n"]) as llm:
        async with aclosing(llm.generate("hello", ENDLESS, "first")) as running:
            await anext(running)
            waiting = asyncio.create_task(read(llm, params, "second"))
            async with asyncio.timeout(200):
                while "second" not in llm._thread.engine._groups:
                    await asyncio.sleep(0.001)
            await llm.abort("second")
            (output,) = await waiting
        found = [(one.index, one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs]
        assert found == [(0, [], [], "abort"), (1, [], [], "abort")]


async def test_an_aborted_request_of_which_the_best_are_sent_has_as_many(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=240, n=1, best_of=3, ignore_eos=True, seed=1)
    reading = asyncio.create_task(read(llm, params, "mine"))
    core = next(iter(llm._thread.engine._scheduler.models)).core
    async with asyncio.timeout(200):
        while not core.num_running:
            await asyncio.sleep(0.001)
    await llm.abort("mine")
    output = (await reading)[-1]
    assert [(one.index, one.finish_reason) for one in output.outputs] == [(0, "abort")]
    await until_idle(llm)


async def test_a_reader_that_leaves_cancels_its_request(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate("hello", LONG)) as outputs:
        async for _ in outputs:
            break
    await until_idle(llm)
    reading = asyncio.create_task(read(llm, LONG))
    await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until_idle(llm)


async def test_an_id_is_of_one_request_at_a_time(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate("hello", ENDLESS, "twice")) as outputs:
        await anext(outputs)
        with pytest.raises(QuireError) as raised:
            await read(llm, LONG, "twice")
        assert raised.value.field == "request_id"
    await until_idle(llm)
    assert (await read(llm, SamplingParams(max_tokens=1), "twice"))[-1].finished


async def test_an_invalid_parameter_is_named(llm: AsyncLLM) -> None:
    with pytest.raises(QuireError) as raised:
        await read(llm, SamplingParams(top_p=2))
    assert raised.value.field == "top_p"


async def test_a_model_that_is_closed_ends_its_streams(model: Path) -> None:
    async with AsyncLLM(str(model), **SMALL, num_blocks=32) as llm:
        outputs = llm.generate("hello", ENDLESS)
        await anext(outputs)
    with pytest.raises(QuireError, match="closed"):
        async for _ in outputs:
            pass
    with pytest.raises(RuntimeError, match="closed"):
        await read(llm, LONG)


async def test_arguments_of_wrong_types_are_named(llm: AsyncLLM) -> None:
    wrong: Any = ["a", "b"]
    with pytest.raises(TypeError, match="a prompt: token ids must be integers, not str"):
        llm.generate(wrong)
    wrong = 5
    with pytest.raises(TypeError, match="request_id: must be a text, not int"):
        llm.generate("x", request_id=wrong)
    with pytest.raises(TypeError, match="request_id: must be a text, not int"):
        await llm.embed("x", request_id=wrong)
