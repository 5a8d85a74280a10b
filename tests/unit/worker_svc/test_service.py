"""The service over a real channel: order of steps, generations, failures, spans and metrics."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY

from quire.worker.v1 import worker_pb2 as pb
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from worker_service import PROMPT, Stream, Worker, new_sequence, scheduled
from worker_svc.batch import Batch
from worker_svc.executor import SampleHandle
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.out_of_memory import Drafts
from worker_svc.prompt_logprobs import PromptPiece
from worker_svc.sequences import Sequence as Known
from worker_svc.step import SamplingParams

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_a_worker_that_is_loading_is_unavailable(loading_worker: Worker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await loading_worker.stub.Describe(pb.DescribeRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_describe_returns_the_workers_description(worker: Worker, tiny_llama: Path) -> None:
    described = await worker.stub.Describe(pb.DescribeRequest())
    assert described.model == tiny_llama.name
    assert (described.context_length, described.vocab_size) == (256, 97)
    assert (described.block_size, described.num_blocks) == (16, 32)
    assert described.block_bytes == 2 * 2 * 2 * 16 * 64 * 4  # keys and values, layers, heads, tokens, width, float32
    assert (described.usual_step_tokens, described.max_step_tokens, described.max_sequences) == (256, 512, 64)
    assert described.num_host_blocks == int(0.001 * 2**30) // described.block_bytes
    assert described.swap_bytes_per_second > 0
    assert described.prefill_tokens_per_second > 0
    assert len(described.fingerprint) == len(described.tokenizer_fingerprint) == 32
    assert described.epoch == 0


async def test_steps_are_answered_in_order_though_they_are_sent_ahead(worker: Worker, tiny_llama: Path) -> None:
    ((*expected,),) = Driver(make_runner(tiny_llama)).generate([PROMPT], 6)
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(5)], scheduled=scheduled((5, 0, 5, 9)))
    for step_id in range(2, 7):
        await stream.send(step_id, scheduled=scheduled((5, 3 + step_id, 1)))
    responses = [await stream.receive() for _ in range(6)]
    assert [response.step_id for response in responses] == [1, 2, 3, 4, 5, 6]
    assert [list(response.result.token_ids) for response in responses] == [[token] for token in expected]
    assert all(response.result.busy_us > 0 for response in responses)


async def test_sampling_and_log_probabilities_cross_the_wire(worker: Worker, tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.8, top_k=40, min_p=0.01, presence_penalty=0.5, seed=-5,
                            frequency_penalty=0.4, repetition_penalty=1.3, logit_bias={7: 2.5}, min_tokens=3,
                            suppressed_token_ids=(11, 12), logprobs=2)  # fmt: skip
    driver = Driver(make_runner(tiny_llama))
    ((*expected,),) = driver.generate([PROMPT], 4, params)
    sent = pb.SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__dataclass_fields__})
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1, sampling=sent)], scheduled=scheduled((1, 0, 5, 0)))
    for step_id in range(2, 5):
        await stream.send(step_id, scheduled=scheduled((1, 3 + step_id, 1)))
    results = [(await stream.receive()).result for _ in range(4)]
    assert [result.token_ids[0] for result in results] == expected
    for result, expected_logprobs in zip(results, driver.logprobs[1], strict=True):
        [of_sequence] = result.logprobs
        assert of_sequence.schedule_index == 0
        assert of_sequence.tokens[0].logprob == pytest.approx(expected_logprobs.logprob, abs=1e-4)
        assert [top.token_id for top in of_sequence.tokens[0].top] == [token for token, _ in expected_logprobs.top]


async def test_the_stream_ends_when_its_requests_do_and_all_are_answered(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await stream.call.done_writing()
    assert (await stream.receive()).step_id == 1
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("message", "expected_text"),
    [
        ({"step_id": 1}, "step 0"),
        ({"step_id": 0, "finished_ids": [1]}, "without work"),
        ({"step_id": 0, "swap_in": pb.BlockCopies(sources=[0], destinations=[0])}, "without work"),
        ({"step_id": 0, "protocol": 99}, "step protocols 1 to 3, not 99"),
        ({"step_id": 0, "epoch": 4, "generation": 9}, "epoch 4"),
        ({"step_id": 0, "epoch": 5, "generation": 2}, "generation 2"),
    ],
)
async def test_a_stream_that_may_not_open_is_refused(
    message: dict[str, Any], expected_text: str, worker: Worker
) -> None:
    await worker.open(epoch=5, generation=2)
    stream = Stream(worker.stub.Step(), 6, 1)
    await stream.send(**message)
    code, details = await stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert expected_text in details


@pytest.mark.parametrize("message", [{"step_id": 3}, {"step_id": 1}, {"step_id": 2, "epoch": 2},
                                     {"step_id": 2, "generation": 2}])  # fmt: skip
async def test_a_step_that_does_not_follow_ends_the_stream(message: dict[str, Any], worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(1)
    await stream.receive()
    await stream.send(**message)
    code, _ = await stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "change",
    [
        {"starts": [0]},
        {"num_tokens": [1, 2, 3]},
        {"num_new_blocks": [1]},
        {"num_new_blocks": [2, 1]},
        {"new_block_ids": [1]},
        {"max_extra_tokens": [0]},
        {"cached_tokens": [pb.CachedTokens(schedule_index=2, num_cached_tokens=1)]},
    ],
    ids=str,
)
async def test_a_schedule_that_does_not_fit_itself_ends_the_stream(change: dict[str, Any], worker: Worker) -> None:
    schedule = scheduled((1, 0, 5, 0), (2, 0, 5, 1))
    for name, values in change.items():
        schedule.ClearField(name)
        getattr(schedule, name).extend(values)
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1), new_sequence(2)], scheduled=schedule)
    code, details = await stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "malformed" in details


async def test_extra_tokens_of_a_worker_without_a_drafter_fail_their_sequence_alone(worker: Worker) -> None:
    schedule = scheduled((1, 0, 5, 0), (2, 0, 5, 1))
    schedule.max_extra_tokens.extend([0, 1])
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1), new_sequence(2)], scheduled=schedule)
    result = (await stream.receive()).result
    assert list(result.num_tokens) == [1, 0]
    assert [failure.message for failure in result.failures] == ["1 extra tokens, but at most 0 are drafted"]


async def test_several_tokens_of_a_step_cross_the_wire(loading_worker: Worker, tiny_llama: Path) -> None:
    (expected,) = (driver := Driver(make_runner(tiny_llama))).generate([PROMPT], 9, SamplingParams(logprobs=1))
    runner = make_runner(tiny_llama, make_drafter=lambda: Knowing(PROMPT + expected), max_draft_tokens=3)
    loading_worker.service.serve(make_instance(runner))
    described = await loading_worker.stub.Describe(pb.DescribeRequest())
    assert described.max_sampled_tokens == 4
    names = [("quire_worker_tokens_total", {"kind": "draft"}), ("quire_worker_accepted_draft_tokens_total", {})]

    def values() -> list[float]:
        return [REGISTRY.get_sample_value(name, labels) or 0.0 for name, labels in names]

    before = values()
    stream = await loading_worker.open()
    sampling = pb.SamplingParams(top_p=1.0, repetition_penalty=1.0, logprobs=1)
    await stream.send(1, new_sequences=[new_sequence(1, sampling=sampling)], scheduled=scheduled((1, 0, 5, 0)))
    # Each step is sent before the one ahead of it is answered, and assumes that it returns one token.
    for step_id, start in ((2, 5), (3, 6)):
        schedule = scheduled((1, start, 1))
        schedule.max_extra_tokens.append(3)
        await stream.send(step_id, scheduled=schedule)
    results = [(await stream.receive()).result for _ in range(3)]
    assert [list(result.token_ids) for result in results] == [expected[:1], expected[1:5], expected[5:9]]
    assert [list(result.num_tokens) for result in results] == [[1], [4], [4]]
    logprobs = [one.logprob for result in results for one in result.logprobs[0].tokens]
    assert logprobs == pytest.approx([one.logprob for one in driver.logprobs[1]], abs=1e-4)
    assert [new - old for new, old in zip(values(), before, strict=True)] == [6, 6]


class Knowing:
    """Drafts what comes."""

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def draft(self, tokens: Any, max_tokens: int) -> list[int]:
        return self._text[len(tokens) : len(tokens) + max_tokens]


async def test_blocks_that_a_step_moves_cross_the_wire(worker: Worker, tiny_llama: Path) -> None:
    ((*expected,),) = Driver(make_runner(tiny_llama)).generate([PROMPT], 2)
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await stream.send(2, swap_out=pb.BlockCopies(sources=[0], destinations=[3]))
    await stream.send(3, new_sequences=[new_sequence(2, [7] * 5)], scheduled=scheduled((2, 0, 5, 0)))
    await stream.send(4, swap_in=pb.BlockCopies(sources=[3], destinations=[9]))
    change = pb.BlockTableUpdate(sequence_id=1, index=0, block_id=8)
    copies = pb.BlockCopies(sources=[9], destinations=[8])
    await stream.send(5, copies=copies, block_table_updates=[change], scheduled=scheduled((1, 5, 1)))
    results = [(await stream.receive()).result for _ in range(5)]
    swap_results = [[(swap.step_id, swap.direction) for swap in result.swaps] for result in results]
    assert swap_results == [[], [(2, pb.DIRECTION_OUT)], [], [(4, pb.DIRECTION_IN)], []]
    assert all(swap.duration_us > 0 and not swap.HasField("failure") for swap in results[1].swaps)
    assert [*results[0].token_ids, *results[4].token_ids] == expected


async def test_a_swap_of_an_unknown_block_is_reported_and_the_stream_continues(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(1, swap_out=pb.BlockCopies(sources=[32], destinations=[0]))
    (swap,) = (await stream.receive()).result.swaps
    assert "beyond" in swap.failure
    await stream.send(2)
    assert (await stream.receive()).step_id == 2


@pytest.mark.parametrize("field", ["swap_out", "swap_in", "copies"])
async def test_blocks_to_copy_without_a_place_end_the_stream(field: str, worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(1, **{field: pb.BlockCopies(sources=[1, 2], destinations=[3])})
    code, details = await stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "malformed" in details


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (pb.ResultKind(embedding=pb.EmbeddingResult()), "embedding"),
        (pb.ResultKind(score=pb.ScoreResult()), "score"),
        (pb.ResultKind(), "a kind of result that it does not know"),
    ],
)
async def test_a_result_that_is_not_computed_fails_its_sequence_alone(
    result: pb.ResultKind, name: str, worker: Worker
) -> None:
    stream = await worker.open()
    asking, other = new_sequence(1, result=result), new_sequence(2, result=pb.ResultKind(tokens=pb.TokensResult()))
    num_tokens = len(PROMPT)
    schedule = scheduled((1, 0, num_tokens, 0), (2, 0, num_tokens, 1))
    await stream.send(1, new_sequences=[asking, other], scheduled=schedule)
    answer = (await stream.receive()).result
    assert list(answer.num_tokens) == [0, 1]
    assert [(one.schedule_index, one.message) for one in answer.failures] == [
        (0, f"this worker does not compute {name}")
    ]


async def test_describe_lists_the_results_that_are_computed(worker: Worker) -> None:
    description = await worker.stub.Describe(pb.DescribeRequest())
    assert [one.result.WhichOneof("kind") for one in description.computed_results] == ["tokens", "prompt_logprobs"]


async def test_a_new_stream_supersedes_the_old_one_and_forgets_its_sequences(worker: Worker) -> None:
    old = await worker.open(generation=1)
    await old.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await old.receive()
    new = await worker.open(generation=2)
    code, details = await old.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "superseded" in details
    await new.send(1, scheduled=scheduled((1, 5, 1)))
    assert [failure.schedule_index for failure in (await new.receive()).result.failures] == [0]


async def test_a_stream_that_broke_can_be_followed_by_another(worker: Worker) -> None:
    first = await worker.open(generation=1)
    await first.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    first.call.cancel()
    second = await worker.open(generation=2)
    await second.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    assert len((await second.receive()).result.token_ids) == 1


async def test_a_step_that_raises_ends_its_stream_without_details(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> SampleHandle:
        raise RuntimeError("secret")

    stream = await worker.open()
    with monkeypatch.context() as patch:
        patch.setattr(HostThreadExecutor, "launch", broken)
        await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.receive()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())
    again = await worker.open(generation=2)
    await again.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    assert len((await again.receive()).result.token_ids) == 1


async def test_the_event_loop_is_free_while_a_step_runs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    described = asyncio.Event()
    loop = asyncio.get_running_loop()

    launch = HostThreadExecutor.launch

    def held(
        executor: HostThreadExecutor,
        batch: Batch,
        sequences: Sequence[Known],
        drafts: Drafts,
        pieces: Sequence[PromptPiece],
    ) -> SampleHandle:
        # The step ends only after another call was answered.
        asyncio.run_coroutine_threadsafe(described.wait(), loop).result(timeout=30)
        return launch(executor, batch, sequences, drafts, pieces)

    monkeypatch.setattr(HostThreadExecutor, "launch", held)
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await worker.stub.Describe(pb.DescribeRequest())
    described.set()
    assert (await stream.receive()).step_id == 1


async def test_metrics_count_steps_tokens_and_swaps(worker: Worker) -> None:
    names = [
        ("quire_worker_steps_total", {}),
        ("quire_worker_step_seconds_count", {}),
        ("quire_worker_tokens_total", {"kind": "prefill"}),
        ("quire_worker_tokens_total", {"kind": "decode"}),
        ("quire_worker_swapped_blocks_total", {"direction": "out"}),
        ("quire_worker_failed_swaps_total", {"direction": "in"}),
    ]

    def values() -> list[float]:
        return [REGISTRY.get_sample_value(name, block_hashes) or 0.0 for name, block_hashes in names]

    before = values()
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await stream.send(2, scheduled=scheduled((1, 5, 1)))
    await stream.receive()
    await stream.receive()
    await stream.send(3, swap_out=pb.BlockCopies(sources=[0, 1], destinations=[1, 0]))
    await stream.send(4, swap_in=pb.BlockCopies(sources=[99], destinations=[0]))
    await stream.receive()
    await stream.receive()
    assert [now - then for now, then in zip(values(), before, strict=True)] == [4, 4, 5, 1, 2, 1]


def _only(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


async def test_a_traced_sequence_has_one_span_in_its_own_trace(worker: Worker, spans: InMemorySpanExporter) -> None:
    traced = new_sequence(1, traceparent=f"00-{TRACE_ID}-b7ad6b7169203331-01")
    stream = await worker.open()
    await stream.send(1, new_sequences=[traced, new_sequence(2)], scheduled=scheduled((1, 0, 5, 0), (2, 0, 5, 1)))
    await stream.send(2, scheduled=scheduled((1, 5, 1)))
    for _ in range(2):
        await stream.receive()
    assert spans.get_finished_spans() == ()
    await stream.send(3, finished_ids=[1, 2])
    await stream.receive()
    span = _only(spans)
    assert span.name == "worker"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.attributes is not None
    assert (span.attributes["quire.tokens.computed"], span.attributes["quire.tokens.sampled"]) == (6, 2)


async def test_spans_end_with_their_stream(worker: Worker, spans: InMemorySpanExporter) -> None:
    stream = await worker.open()
    traced = new_sequence(1, traceparent=f"00-{TRACE_ID}-b7ad6b7169203331-01")
    await stream.send(1, new_sequences=[traced], scheduled=scheduled((1, 0, 5, 0)))
    await stream.receive()
    await worker.open(generation=2)
    assert _only(spans).name == "worker"
