"""When and where a request is retried."""

import grpc
import pytest

from quire.inference.v1 import inference_pb2 as pb
from quire_client.errors import QuireError
from quire_client.results import FinishReason, ToolCall
from quire_client.resumable_stream import EndpointList, ResumableStream, RetryPolicy
from quire_client.stream_assembler import StreamAssembler

CODE = grpc.StatusCode


def answer(reason: str, code: grpc.StatusCode = CODE.UNAVAILABLE, retry_after: float | None = None) -> QuireError:
    """An error that a gateway sent."""
    return QuireError(code, reason, "why", retry_after=retry_after, is_answer=True)


def broken(code: grpc.StatusCode = CODE.UNAVAILABLE) -> QuireError:
    """An error of the connection."""
    return QuireError(code, "UNREACHABLE", "no connection")


def reached(num_endpoints: int = 1) -> EndpointList:
    """SyncEndpointPool in which one endpoint has answered before."""
    endpoint_list = EndpointList(num_endpoints)
    endpoint_list.has_answered = True
    return endpoint_list


def retry_policy(
    endpoint_list: EndpointList,
    resume_timeout: float | None = 60,
    timeout: float | None = None,
    random_fraction: float = 1,
) -> RetryPolicy:
    made = RetryPolicy(endpoint_list, timeout, resume_timeout, random_fraction=lambda: random_fraction)
    made.begin_call(0.0)
    return made


def num_tries(of: RetryPolicy, error: QuireError, now: float = 1.0) -> int:
    """The number of calls if each ends at once with `error`."""
    for tries in range(1, 100):
        try:
            of.failed(error, 0, now)
        except QuireError:
            return tries
    return 100


def test_a_call_goes_to_the_next_gateway_once_however_many_found_the_last_one_away() -> None:
    endpoint_list = EndpointList(3)
    endpoint_list.advance_from(0)
    endpoint_list.advance_from(0)
    assert endpoint_list.current == 1
    endpoint_list.advance_from(1)
    endpoint_list.advance_from(2)
    assert endpoint_list.current == 0


def test_pauses_double_to_a_second_and_come_after_each_round() -> None:
    alone, of_two = retry_policy(reached()), retry_policy(reached(2))

    assert [alone.failed(broken(), 0, 1.0) for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1]
    assert [of_two.failed(broken(), place % 2, 1.0) for place in range(6)] == [0, 0.05, 0, 0.1, 0, 0.2]


def test_pauses_are_spread_over_their_second_half() -> None:
    assert retry_policy(reached(), random_fraction=0).failed(broken(), 0, 1.0) == 0.025


def test_no_pause_is_shorter_than_the_servers_hint_where_no_gateway_is_left() -> None:
    alone, of_two = retry_policy(reached(), random_fraction=0), retry_policy(reached(2), random_fraction=0)
    short, long = answer("MODEL_NOT_READY", retry_after=0.01), answer("CAPACITY_EXHAUSTED", retry_after=2)

    assert [alone.failed(error, 0, 1.0) for error in (long, long, broken())] == [2, 2, 2]
    assert alone.failed(short, 0, 3.5) == 0.2
    assert of_two.failed(long, 0, 1.0) == 0
    assert of_two.failed(broken(), 1, 1.5) == 1.5  # the first one did not want a call before 3.0


def test_pauses_by_a_hint_are_spread_over_a_tenth() -> None:
    assert retry_policy(reached()).failed(answer("CAPACITY_EXHAUSTED", retry_after=2), 0, 1.0) == pytest.approx(2.2)


def test_a_hint_is_forgotten_after_progress() -> None:
    of = retry_policy(reached())
    of.failed(answer("CAPACITY_EXHAUSTED", retry_after=2), 0, 1.0)
    of.progressed()

    assert of.failed(broken(), 0, 1.0) == 0.05


def test_no_hint_of_a_gateway_that_is_draining_is_waited_for() -> None:
    """Behind its address may be others."""
    assert retry_policy(reached()).failed(answer("DRAINING", retry_after=1), 0, 1.0) == 0.05


def test_without_patience_the_other_gateways_are_tried_once() -> None:
    of = retry_policy(EndpointList(2), resume_timeout=0)
    assert of.failed(broken(), 0, 1.0) == 0
    with pytest.raises(QuireError):
        of.failed(answer("CAPACITY_EXHAUSTED", retry_after=1), 1, 1.0)


def test_no_pause_goes_beyond_the_patience() -> None:
    of = retry_policy(reached(), resume_timeout=3)
    full = answer("CAPACITY_EXHAUSTED", retry_after=2)

    assert of.failed(full, 0, 1.0) == pytest.approx(2.2)
    assert of.failed(full, 0, 3.2) == pytest.approx(0.8)
    with pytest.raises(QuireError):
        of.failed(full, 0, 4.0)


def test_a_hint_beyond_the_deadline_raises_the_error_unless_another_gateway_is_left() -> None:
    full = answer("CAPACITY_EXHAUSTED", retry_after=2)
    reported: list[QuireError] = []
    of = RetryPolicy(reached(2), 2.5, 60, reported.append, random_fraction=lambda: 1)
    of.begin_call(0.0)

    assert of.failed(full, 0, 1.0) == 0
    with pytest.raises(QuireError) as caught:
        of.failed(full, 1, 1.0)
    assert caught.value is full
    alone = RetryPolicy(reached(), 2, 60, reported.append)
    alone.begin_call(0.0)
    with pytest.raises(QuireError):
        alone.failed(full, 0, 1.0)
    assert reported == []


def test_pauses_begin_anew_after_progress() -> None:
    of = retry_policy(reached())
    of.failed(broken(), 0, 1.0)
    of.failed(broken(), 0, 1.1)
    of.progressed()

    assert of.failed(broken(), 0, 1.2) == 0.05


def test_patience_counts_from_the_first_failure_without_progress_in_between() -> None:
    of = retry_policy(reached(), resume_timeout=60)
    of.failed(broken(), 0, 1000.0)  # after a long time in a queue
    of.begin_call(1055.0)
    of.failed(broken(), 0, 1059.0)
    of.begin_call(1060.0)

    with pytest.raises(QuireError):
        of.failed(broken(), 0, 1061.0)


def test_a_call_that_lived_long_was_with_a_gateway_that_answered() -> None:
    of = retry_policy(reached(), resume_timeout=60)
    of.failed(broken(), 0, 10.0)
    of.begin_call(10.0)

    assert of.failed(broken(), 0, 100.0) == 0.05


def test_each_break_is_reported_once() -> None:
    reported: list[QuireError] = []
    of = RetryPolicy(reached(), resume_timeout=60, on_resume=reported.append)
    of.begin_call(0.0)
    first, second = broken(), broken()
    of.failed(first, 0, 1.0)
    of.failed(broken(), 0, 1.1)
    of.progressed()
    of.failed(second, 0, 1.2)

    assert reported == [first, second]
    assert of.num_resumes == 2


@pytest.mark.parametrize(
    "error",
    [broken(), broken(CODE.INTERNAL), broken(CODE.CANCELLED), answer("DRAINING"), answer("MODEL_NOT_READY")],
    ids=str,
)
def test_what_passes_is_waited_for(error: QuireError) -> None:
    assert num_tries(retry_policy(reached()), error) == 100


@pytest.mark.parametrize(
    "error",
    [
        answer("INTERNAL", CODE.INTERNAL),
        answer("REQUEST_QUARANTINED", CODE.INTERNAL),
        answer("CANCELLED", CODE.CANCELLED),
        answer("REQUEST_UNKNOWN", CODE.NOT_FOUND),
        answer("DEADLINE_TOO_SHORT", retry_after=1),
        broken(CODE.DEADLINE_EXCEEDED),
        broken(CODE.UNKNOWN),
        broken(CODE.UNIMPLEMENTED),
    ],
    ids=str,
)
def test_what_does_not_pass_comes_through_at_once(error: QuireError) -> None:
    assert num_tries(retry_policy(reached()), error) == 1


def test_where_no_gateway_ever_responded_each_is_tried_a_few_times_only() -> None:
    assert num_tries(retry_policy(EndpointList(1)), broken()) == 4
    assert num_tries(retry_policy(EndpointList(9)), broken()) == 9


def test_an_answer_shows_that_somebody_is_there() -> None:
    assert num_tries(retry_policy(EndpointList(1)), answer("MODEL_NOT_READY")) == 100


@pytest.mark.parametrize(("retry_after", "tries"), [(None, 4), (2, 4), (7, 1)])
def test_a_crowd_is_added_to_a_few_times_and_only_where_it_clears_soon(retry_after: float | None, tries: int) -> None:
    assert num_tries(retry_policy(reached()), answer("CAPACITY_EXHAUSTED", retry_after=retry_after)) == tries


def test_a_request_that_was_taken_is_no_longer_one_of_the_crowd() -> None:
    of = retry_policy(reached())
    of.progressed()
    assert num_tries(of, answer("CAPACITY_EXHAUSTED", retry_after=7)) == 100


def test_without_resuming_only_what_was_not_taken_is_tried_again() -> None:
    assert num_tries(retry_policy(reached(), None), answer("DRAINING")) == 4
    assert num_tries(retry_policy(reached(), None), broken(CODE.INTERNAL)) == 1
    begun = retry_policy(reached(), None)
    begun.progressed()
    assert num_tries(begun, answer("DRAINING")) == 1


@pytest.mark.parametrize(("retry_after", "tries"), [(2, 4), (7, 1)])
def test_without_resuming_no_long_hint_is_waited_for(retry_after: float, tries: int) -> None:
    assert num_tries(retry_policy(reached(), None), answer("MODEL_NOT_READY", retry_after=retry_after)) == tries


def test_calls_share_one_deadline_and_no_pause_goes_beyond_it() -> None:
    of = retry_policy(reached(), timeout=10)

    assert of.begin_call(4.0) == 6
    assert of.failed(broken(), 0, 9.99) == pytest.approx(0.01)
    with pytest.raises(QuireError) as caught:
        of.begin_call(10.0)
    assert caught.value.code is CODE.DEADLINE_EXCEEDED


def said(**event: object) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(**event)  # type: ignore[arg-type]


def resumable() -> ResumableStream:
    request = pb.StreamGenerateRequest(generation=pb.Generation(text="x", request_id="r"))
    return ResumableStream(request, retry_policy(reached()))


def test_a_stream_is_sent_again_until_it_is_accepted_and_then_resumed() -> None:
    of = resumable()
    assert isinstance(of.begin_call(1.0)[0], pb.StreamGenerateRequest)
    of.read(said(acceptance=pb.Acceptance(request_id="r", seed=3)))
    of.read(said(chunk=pb.Chunk(index=1, token_ids=[5, 6])))
    of.read(said(chunk=pb.Chunk(index=0, token_ids=[5])))
    of.read(said(chunk=pb.Chunk(index=1, offset=2, token_ids=[7])))

    request, _ = of.begin_call(2.0)

    assert request == pb.ResumeRequest(
        request_id="r", positions=[pb.Position(index=1, next_offset=3), pb.Position(index=0, next_offset=1)]
    )


def test_a_repeated_end_of_a_sequence_is_ignored() -> None:
    of = resumable()
    end = said(chunk=pb.Chunk(index=0, text=".", finish=pb.Finish(reason=pb.FINISH_REASON_STOP)))

    assert of.read(end) is not None
    assert of.read(end) is None


@pytest.mark.parametrize("offset", [0, 1, 3], ids=["again", "overlapping", "beyond"])
def test_tokens_that_do_not_follow_are_an_error(offset: int) -> None:
    of = resumable()
    of.read(said(chunk=pb.Chunk(token_ids=[5, 6])))

    with pytest.raises(QuireError) as caught:
        of.read(said(chunk=pb.Chunk(offset=offset, token_ids=[7, 8])))
    assert caught.value.reason == "BROKEN_STREAM"


def test_more_of_a_sequence_that_has_ended_is_an_error() -> None:
    of = resumable()
    of.read(said(chunk=pb.Chunk(token_ids=[5], finish=pb.Finish(reason=pb.FINISH_REASON_STOP))))

    with pytest.raises(QuireError, match="are missing or came twice"):
        of.read(said(chunk=pb.Chunk(offset=1, token_ids=[6])))


def test_another_request_under_the_same_name_is_an_error() -> None:
    of = resumable()
    of.read(said(acceptance=pb.Acceptance(request_id="r", seed=3)))

    of.read(said(acceptance=pb.Acceptance(request_id="r", seed=3, is_durable=True)))
    assert of.acceptance is not None
    assert of.acceptance.is_durable
    with pytest.raises(QuireError, match="another request"):
        of.read(said(acceptance=pb.Acceptance(request_id="r", seed=4)))


def test_a_break_behind_the_usage_does_not_matter() -> None:
    of = resumable()
    of.read(said(usage=pb.Usage()))

    assert of.failed(answer("INTERNAL", CODE.INTERNAL), 0, 1.0) == 0


def test_calls_and_reasoning_of_a_stream_are_assembled() -> None:
    of = StreamAssembler()
    of.read(said(acceptance=pb.Acceptance(request_id="a")))
    first = pb.ToolCallDelta(index=0, id="call_a", name="f", arguments='{"x"')
    second = [pb.ToolCallDelta(index=0, arguments=": 1}"), pb.ToolCallDelta(index=1, id="call_b", name="g")]
    custom = [pb.ToolCallDelta(index=2, id="call_c", name="run", input=""), pb.ToolCallDelta(index=2, input="1+")]
    finish = pb.Finish(reason=pb.FINISH_REASON_TOOL_CALLS)
    messages = [
        said(chunk=pb.Chunk(token_ids=[5], reasoning="Hm")),
        said(chunk=pb.Chunk(offset=1, token_ids=[6], reasoning=".", text="I look.", tool_calls=[first])),
        said(chunk=pb.Chunk(offset=2, token_ids=[7], tool_calls=[*second, custom[0]])),
        said(chunk=pb.Chunk(offset=3, token_ids=[8], tool_calls=custom[1:], finish=finish)),
    ]
    chunks = [chunk for chunk in map(of.read, messages) if chunk is not None]
    of.read(said(usage=pb.Usage(completion_tokens=3)))
    generation = of.assemble(chunks)
    assert (generation.text, generation.reasoning) == ("I look.", "Hm.")
    assert generation.tool_calls == (
        ToolCall("call_a", "f", '{"x": 1}'),
        ToolCall("call_b", "g", ""),
        ToolCall("call_c", "run", input="1+"),
    )
    assert [piece.input for chunk in chunks for piece in chunk.tool_calls] == [None, None, None, "", "1+"]
    assert generation.finish_reason is FinishReason.TOOL_CALLS


def test_a_prompt_is_a_part_of_the_whole_and_may_come_again() -> None:
    prompt = pb.Prompt(
        token_ids=[5, 6], text="ab", logprobs=[pb.TokenLogprob(token_id=6, token_bytes=b"b", logprob=-1)]
    )
    of = StreamAssembler()
    assert of.read(pb.StreamGenerateResponse(acceptance=pb.Acceptance(request_id="a"))) is None
    assert of.prompt is None
    assert of.read(pb.StreamGenerateResponse(prompt=prompt)) is None
    chunk = of.read(
        pb.StreamGenerateResponse(chunk=pb.Chunk(token_ids=[7], finish=pb.Finish(reason=pb.FINISH_REASON_STOP)))
    )
    assert of.read(pb.ResumeResponse(prompt=prompt)) is None
    of.read(pb.ResumeResponse(usage=pb.Usage()))
    assert chunk is not None
    whole = of.assemble([chunk])
    assert whole.prompt is not None
    assert (whole.prompt.token_ids, whole.prompt.text) == ((5, 6), "ab")
    assert [(one.token_id, one.logprob) for one in whole.prompt.logprobs] == [(6, -1.0)]
