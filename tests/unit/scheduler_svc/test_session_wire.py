"""Messages of the session stream as the core's values, and back."""

import time
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.account_limits import NO_LIMITS, AccountLimits
from scheduler_svc.core.events import (
    Event,
    FailedEvent,
    Failure,
    MaxTokens,
    PromptLogprobsEvent,
    StopToken,
    TokensEvent,
    ValueComputed,
)
from scheduler_svc.core.request import BeamParams, EarlyStopping, Request, Sequence
from scheduler_svc.core.results import TOKENS, ResultForm
from scheduler_svc.request_log import RecordState, RequestLog, SequenceLog
from scheduler_svc.session_wire import (
    accepted_to_proto,
    attached_message,
    event_to_proto,
    failed_to_proto,
    fill_event,
    prompt_logprobs_to_proto,
    protocol_to_render,
    request_from_log,
    request_from_proto,
    tokens_to_proto,
)

NOW = 1_000.0


def read(**fields: Any) -> Request:
    return request_from_proto(scheduler_v1.Submit(key="k", prompt_token_ids=[5], **fields), NOW)


def search(**fields: Any) -> scheduler_v1.BeamSearch:
    known: dict[str, Any] = {"width": 4, "early_stopping": scheduler_v1.EARLY_STOPPING_HEURISTIC}
    return scheduler_v1.BeamSearch(**(known | fields))


def test_the_time_until_the_deadline_counts_from_now() -> None:
    def at(deadline: float | None) -> Request:
        return request_from_log(RequestLog(scheduler_v1.Submit(), time.time(), deadline), NOW)

    request = at(time.time() + 2.5)
    assert request.arrived_at == pytest.approx(NOW, abs=1)
    assert request.deadline is not None
    assert NOW < request.deadline <= NOW + 2.5
    assert at(time.time() - 1).deadline == NOW
    assert at(None).deadline is None


def test_the_limits_of_an_account_are_read() -> None:
    values: dict[str, Any] = {
        "account": "search/batch",
        "max_running": 1,
        "max_queued": 0,
        "max_kv_blocks": 2,
        "tokens_per_minute": 2**40,
        "requests_per_minute": 3,
        "cached_token_factor": 0.0,
    }
    assert read(limits=scheduler_v1.AccountLimits(**values)).limits == AccountLimits(**values)
    assert read(limits=scheduler_v1.AccountLimits(account="search/")).limits == AccountLimits("search/")
    assert read().limits is NO_LIMITS


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_a_beam_search_is_read(early_stopping: EarlyStopping) -> None:
    value = scheduler_v1.EarlyStopping.Value(f"EARLY_STOPPING_{early_stopping.name}")
    request = read(n=2, beam_search=search(length_penalty=-0.5, early_stopping=value))
    assert request.beam == BeamParams(width=4, length_penalty=-0.5, early_stopping=early_stopping)
    assert read().beam is None


def test_a_beam_search_gets_the_top_tokens_that_it_needs_and_returns_those_requested() -> None:
    ending = [1, 2, 3]
    silent = read(beam_search=search(), stop_token_ids=ending)
    assert isinstance(silent.sampling, worker_v1.SamplingParams)
    assert isinstance(silent.beam, BeamParams)
    assert (silent.sampling.logprobs, silent.beam.logprobs) == (7, None)
    sampling = worker_v1.SamplingParams(logprobs=20, min_tokens=2)
    telling = read(beam_search=search(), stop_token_ids=ending, sampling=sampling)
    assert isinstance(telling.sampling, worker_v1.SamplingParams)
    assert isinstance(telling.beam, BeamParams)
    assert (telling.sampling.logprobs, telling.beam.logprobs, telling.sampling.min_tokens) == (20, 20, 2)


def kind_of(name: str) -> worker_v1.ResultKind:
    kind = worker_v1.ResultKind()
    getattr(kind, name).SetInParent()
    return kind


@pytest.mark.parametrize("name", worker_v1.ResultKind.DESCRIPTOR.fields_by_name)
def test_every_kind_of_the_contract_is_known(name: str) -> None:
    assert read(result=kind_of(name)).result.name == name


@pytest.mark.parametrize(
    ("name", "form", "max_tokens"),
    [
        ("tokens", ResultForm.TOKENS, 5),
        ("prompt_logprobs", ResultForm.TOKENS_AND_PROMPT_LOGPROBS, 5),
        ("embedding", ResultForm.VALUE, 1),
    ],
)
def test_a_value_takes_the_place_of_a_token(name: str, form: ResultForm, max_tokens: int) -> None:
    request = read(result=kind_of(name), max_tokens=0 if form is ResultForm.VALUE else 5)
    assert (request.result.form, request.max_tokens) == (form, max_tokens)
    assert request.result_params == kind_of(name)
    assert read(max_tokens=5).result is TOKENS


def test_a_kind_of_a_later_release_is_one_that_no_worker_computes() -> None:
    request = read(result=worker_v1.ResultKind())
    assert request.result.name == "result of a kind that this scheduler does not know"


@pytest.mark.parametrize("failure", Failure)
def test_every_failure_has_its_reason(failure: Failure) -> None:
    failed = event_to_proto(FailedEvent(read(), failure, "why")).failed
    assert scheduler_v1.FailureReason.Name(failed.reason) == f"FAILURE_REASON_{failure.name}"
    assert (failed.message, failed.HasField("retry_after")) == ("why", False)


def test_a_failure_has_a_time_to_retry() -> None:
    failed = event_to_proto(FailedEvent(read(), Failure.TENANT_OVER_QUOTA, "why", retry_after=7.25)).failed
    assert failed.retry_after == Duration(seconds=7, nanos=250_000_000)


def test_a_value_is_the_end_of_a_sequence_without_tokens() -> None:
    sequence = Sequence(5, read(), 0, 0, [5, 7])
    sequence.num_cached_prompt_tokens = 1
    value = worker_v1.PromptValue(numbers=[0.5, -1.0])
    tokens = event_to_proto(TokensEvent(sequence, 0, (), end=ValueComputed(value))).tokens
    assert tokens == scheduler_v1.Tokens(end=scheduler_v1.SequenceEnd(value=value), cached_tokens=1)
    kept = SequenceLog(end=tokens.end, cached_tokens=1)
    replayed = RequestLog(scheduler_v1.Submit(key="k", n=1), accepted_at=1.0, sequences=[kept])
    assert list(attached_message(0, replayed, 7).events[0].attached.sequences) == [tokens]


def test_log_probabilities_of_a_prompt_have_their_position() -> None:
    logprobs = [worker_v1.TokenLogprobs(logprob=-place) for place in (3, 4)]
    event = event_to_proto(PromptLogprobsEvent(read(), 3, logprobs))
    assert event == scheduler_v1.Event(key="k", prompt_logprobs=scheduler_v1.PromptLogprobs(offset=3, tokens=logprobs))


def test_attached_has_the_log_probabilities_of_the_prompt() -> None:
    recorded = log()
    assert not attached_message(0, recorded, 7).events[0].attached.HasField("prompt_logprobs")
    recorded.prompt_logprobs = [worker_v1.TokenLogprobs(logprob=-place) for place in (1, 2)]
    logprobs = attached_message(0, recorded, 7).events[0].attached.prompt_logprobs
    assert (logprobs.offset, list(logprobs.tokens)) == (1, recorded.prompt_logprobs)
    later = prompt_logprobs_to_proto(recorded, 1).prompt_logprobs
    assert (later.offset, list(later.tokens)) == (2, recorded.prompt_logprobs[1:])


@pytest.mark.parametrize("options", [{"echo": True}, {"prompt_logprobs": 0}])
def test_attached_has_a_prompt_that_is_returned(options: dict[str, Any]) -> None:
    assert not attached_message(0, log(), 7).events[0].attached.prompt_token_ids
    recorded = log(render_options=scheduler_v1.RenderOptions(**options))
    assert list(attached_message(0, recorded, 7).events[0].attached.prompt_token_ids) == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "protocol"),
    [
        ({"keep_special_tokens": True, "logprobs": 1}, 1),
        ({"turn": scheduler_v1.TurnFormat(tools="hermes")}, 2),
        ({"turn": scheduler_v1.TurnFormat(tools="hermes"), "prompt_logprobs": 0}, 3),
        ({"turn": scheduler_v1.TurnFormat(callable=[scheduler_v1.CallableTool(name="run", is_custom=True)])}, 3),
        ({"echo": True}, 3),
        ({"omits_output": True}, 3),
        ({"logprob_token_ids": [3]}, 3),
        ({"joins_special_tokens": True}, 3),
    ],
)
def test_gateways_that_would_return_another_answer_do_not_attach(options: dict[str, Any], protocol: int) -> None:
    assert protocol_to_render(scheduler_v1.RenderOptions(**options)) == protocol


@pytest.mark.parametrize(
    ("sampling", "protocol"),
    [
        ({"temperature": 1.0, "logprobs": 1}, 1),
        ({"allowed_token_ids": [3]}, 2),
        ({"bad_words": [worker_v1.TokenSequence(token_ids=[3])]}, 2),
        ({"logprob_token_ids": [3]}, 2),
    ],
)
def test_workers_of_a_release_without_a_parameter_do_not_get_the_request(
    sampling: dict[str, Any], protocol: int
) -> None:
    assert read(sampling=worker_v1.SamplingParams(**sampling)).protocol == protocol


def log(**fields: Any) -> RequestLog:
    submit = scheduler_v1.Submit(
        key="k", submission_id="s", prompt_token_ids=[1, 2, 3], n=2, sampling=worker_v1.SamplingParams(seed=9), **fields
    )
    logprobs = [worker_v1.TokenLogprobs(logprob=-token) for token in (4, 5)]
    ended = SequenceLog(
        [4, 5], logprobs, scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString()), cached_tokens=2, score=0.5
    )
    return RequestLog(submit, accepted_at=1.0, sequences=[ended, SequenceLog()], record=RecordState.RECORDED)


def test_attached_has_all_tokens() -> None:
    render_options = scheduler_v1.RenderOptions(request_id="mine", stops=["x"])
    event = attached_message(0, log(render_options=render_options, detachable=True), 7).events[0]
    attached = event.attached
    assert (event.key, event.command_id) == ("k", 7)
    assert attached.render_options == render_options
    assert (attached.prompt_length, attached.num_sequences, attached.seed) == (3, 2, 9)
    assert (attached.submission_id, attached.detachable) == ("s", True)
    ended, begun = attached.sequences
    assert (list(ended.token_ids), [part.logprob for part in ended.logprobs]) == ([4, 5], [-4, -5])
    assert (ended.cached_tokens, ended.score, ended.end.WhichOneof("cause")) == (2, 0.5, "stop_string")
    assert (begun.index, len(begun.token_ids), begun.HasField("end")) == (1, 0, False)
    assert not begun.HasField("cached_tokens")


def test_new_tokens_have_their_offset() -> None:
    tokens = tokens_to_proto(log(), 0, 1).tokens
    assert (tokens.offset, list(tokens.token_ids), [part.logprob for part in tokens.logprobs]) == (1, [5], [-5])
    assert not tokens.HasField("cached_tokens")


def test_the_first_tokens_of_a_sequence_have_the_cached_count() -> None:
    sequence = Sequence(5, read(), 1, 0, [5, 7])
    sequence.num_cached_prompt_tokens = 0
    first, later = (event_to_proto(TokensEvent(sequence, offset, [7])) for offset in (0, 1))
    assert first == scheduler_v1.Event(key="k", tokens=scheduler_v1.Tokens(index=1, token_ids=[7], cached_tokens=0))
    assert later == scheduler_v1.Event(key="k", tokens=scheduler_v1.Tokens(index=1, offset=1, token_ids=[7]))


def test_the_last_tokens_of_a_sequence_have_its_end() -> None:
    sequence = Sequence(5, read(), 0, 0, [5, 7])
    ends = [event_to_proto(TokensEvent(sequence, 3, [7], end=end)).tokens.end for end in (StopToken(7), MaxTokens())]
    assert [end.WhichOneof("cause") for end in ends] == ["stop_token_id", "length"]
    assert ends[0].stop_token_id == 7


def test_an_event_is_the_same_in_a_message_of_others() -> None:
    sequence = Sequence(5, read(), 0, 0, [5, 6, 7])
    logprobs = [worker_v1.TokenLogprobs(logprob=-1.5, top=[worker_v1.Logprob(token_id=7, logprob=-1.5)])]
    events: list[Event] = [
        TokensEvent(sequence, 2, [7], logprobs, StopToken(7), 0.0),
        PromptLogprobsEvent(sequence.request, 1, logprobs),
        FailedEvent(sequence.request, Failure.CANCELLED, "cancelled", retry_after=1.0),
    ]
    message = scheduler_v1.SessionResponse()
    for event in events:
        fill_event(message.events.add(), event)
    assert list(message.events) == [event_to_proto(event) for event in events]
    assert list(message.events[0].tokens.logprobs) == logprobs
    assert message.events[0].tokens.HasField("score")


def test_an_acceptance_has_whether_the_request_is_recorded() -> None:
    event = accepted_to_proto(log(), 7)
    assert (event.command_id, event.accepted.is_durable) == (7, True)


def test_a_refusal_names_what_it_refuses() -> None:
    assert failed_to_proto("k", Failure.DIVERGED, "why", command_id=7).command_id == 7
    assert not failed_to_proto("k", Failure.CANCELLED, "why").HasField("command_id")
