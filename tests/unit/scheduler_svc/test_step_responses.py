"""Invalid responses of a worker, over real gRPC: they are rejected and counted, and affect no request."""

import math
from typing import Any

import pytest
from prometheus_client import REGISTRY

from checksum_service import VOCAB
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.step import NewSequence, ScheduledSequence, StepPlan
from scheduler_svc.step_responses import InvalidPart, InvalidResponse, ResponseValidator
from worker_links import Change, ScriptedWorker, deployment, of_response, served, until


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose answer was refused is dialled again at once."""
    monkeypatch.setattr("scheduler_svc.worker_link._REDIAL", 0.02)


def refusals(reason: str) -> float:
    """The count, which is there before the first refusal: Prometheus sees no increase where a series begins."""
    count = REGISTRY.get_sample_value("quire_responses_refused_total", {"reason": reason})
    assert count is not None
    return count


def of_result(**columns: list[Any]) -> Change:
    """Puts other columns into a result."""

    def change(response: worker_v1.StepResponse) -> None:
        for name, values in columns.items():
            response.result.ClearField(name)
            getattr(response.result, name).extend(values)

    return change


def not_a_result(response: worker_v1.StepResponse) -> None:
    response.ready.SetInParent()


def with_logprobs(*tokens: worker_v1.TokenLogprobs) -> Change:
    return of_result(logprobs=[worker_v1.SequenceLogprobs(schedule_index=0, tokens=tokens)])


ONE = [worker_v1.Logprob(token_id=1, logprob=-1)]
BAD = {
    "another epoch": ("epoch", of_response(epoch=-1)),
    "another generation": ("generation", of_response(generation=-1)),
    "a step before": ("step", of_response(step_id=-1)),
    "a step beyond": ("step", of_response(step_id=1)),
    "ready": ("malformed", not_a_result),
    "columns of different lengths": ("malformed", of_result(num_tokens=[1, 1])),
    "more tokens than rows": ("malformed", of_result(token_ids=[1, 2])),
    "a failure of no row": ("malformed", of_result(failures=[worker_v1.SequenceFailure(schedule_index=1)])),
    "a transfer in no direction": ("malformed", of_result(swaps=[worker_v1.SwapResult(step_id=1)])),
    "another sequence": ("sequences", of_result(sequence_ids=[99])),
    "no sequence": ("sequences", of_result(sequence_ids=[], num_tokens=[], token_ids=[], logprobs=[])),
    "a token beyond the vocabulary": ("tokens", of_result(token_ids=[VOCAB])),
    "no token": ("tokens", of_result(num_tokens=[0], token_ids=[])),
    "two tokens": ("tokens", of_result(num_tokens=[2], token_ids=[1, 2])),
    "a failure with a token": (
        "tokens",
        of_result(failures=[worker_v1.SequenceFailure(schedule_index=0, message="bad")]),
    ),
    "no log-probabilities": ("logprobs", of_result(logprobs=[])),
    "a log-probability that is no number": (
        "logprobs",
        with_logprobs(worker_v1.TokenLogprobs(logprob=math.nan, top=ONE)),
    ),
    "no top tokens": ("logprobs", with_logprobs(worker_v1.TokenLogprobs(logprob=-1))),
    "a top token outside the vocabulary": (
        "logprobs",
        with_logprobs(worker_v1.TokenLogprobs(logprob=-1, top=[worker_v1.Logprob(token_id=VOCAB, logprob=-1)])),
    ),
    "a top token without a finite log-probability": (
        "logprobs",
        with_logprobs(worker_v1.TokenLogprobs(logprob=-1, top=[worker_v1.Logprob(token_id=1, logprob=-math.inf)])),
    ),
    "log-probabilities of two tokens": ("logprobs", with_logprobs(*[worker_v1.TokenLogprobs(logprob=-1, top=ONE)] * 2)),
    "a value that nobody asked for": (
        "results",
        of_result(values=[worker_v1.SequenceValue(value=worker_v1.PromptValue(numbers=[1]))]),
    ),
    "log-probabilities of a prompt that nobody asked for": (
        "results",
        of_result(prompt_logprobs=[worker_v1.SequenceLogprobs(tokens=[worker_v1.TokenLogprobs(logprob=-1)])]),
    ),
    "a transfer that is not under way": (
        "swaps",
        of_result(swaps=[worker_v1.SwapResult(step_id=1, direction=worker_v1.DIRECTION_OUT)]),
    ),
}


@pytest.mark.parametrize(("reason", "change"), BAD.values(), ids=BAD.keys())
async def test_a_bad_answer_is_refused_and_counted_and_changes_nothing(reason: str, change: Change) -> None:
    worker, before = ScriptedWorker(), refusals(reason)
    async with served(worker) as addresses, deployment(*addresses) as running:
        worker.change = change
        await running.gateway.finish(running.gateway.submit())
        assert refusals(reason) == before + 1
        assert len(worker.openings) == 2


async def test_an_answer_that_comes_twice_is_refused() -> None:
    worker, before = ScriptedWorker(), refusals("step")
    worker.repeats = True
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.gateway.finish(running.gateway.submit())
        assert refusals("step") == before + 1


async def test_a_failed_row_is_no_refusal() -> None:
    worker = ScriptedWorker()
    worker.failing_token = 999
    async with served(worker) as addresses, deployment(*addresses) as running:
        bad, good = running.gateway.submit(prompt=[999, 1, 2]), running.gateway.submit()
        await until(lambda: bad in running.gateway.failed)
        await running.gateway.finish(good)
        assert len(worker.openings) == 1


def plan_of(replica: Replica, sequence: Sequence, *, is_new: bool = False, departed: bool = False) -> StepPlan:
    """A step in flight, in which a sequence samples."""
    replica.num_steps += 1
    new_sequences = [NewSequence(sequence, [1])] if is_new else []
    plan = StepPlan(
        replica.num_steps, [sequence.id] * departed, new_sequences, [ScheduledSequence(sequence, 0, 1, [], 0, True)]
    )
    replica.steps_in_flight.append(plan)
    return plan


def answer_to(plan: StepPlan, *logprobs: worker_v1.TokenLogprobs) -> worker_v1.StepResponse:
    response = worker_v1.StepResponse(epoch=1, generation=1, step_id=plan.step_id)
    response.result.sequence_ids.extend(part.sequence.id for part in plan.scheduled)
    response.result.num_tokens.append(1)
    response.result.token_ids.append(1)
    if logprobs:
        response.result.logprobs.add(schedule_index=0, tokens=logprobs)
    return response


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_requested_log_probabilities_are_due_in_every_step(refused: int) -> None:
    """Also in a step that is in flight while the sequence departs, and once it came back under its id."""
    replica = Replica(ReplicaShape(b"", 16, 8, 64, 64, 8))
    sampling = worker_v1.SamplingParams(logprobs=1)
    sequence = Sequence(7, Request("k", [1], 1, 8, sampling=sampling), 0, 0, [1])
    validator = ResponseValidator(worker_v1.StepRequest(epoch=1, generation=1), VOCAB)
    plans = [plan_of(replica, sequence, is_new=True), plan_of(replica, sequence)]
    for plan in plans:
        validator.expect(plan)
    plans.append(plan_of(replica, sequence, is_new=True, departed=True))
    validator.expect(plans[-1])
    for plan in plans:
        if plan.step_id == refused:
            with pytest.raises(InvalidResponse) as refusal:
                validator.outcome_of(answer_to(plan), replica)
            assert refusal.value.part is InvalidPart.LOGPROBS
            return
        validator.outcome_of(answer_to(plan, worker_v1.TokenLogprobs(logprob=-1, top=ONE)), replica)
        replica.finish_step()


def test_log_probabilities_are_not_due_unless_requested() -> None:
    replica = Replica(ReplicaShape(b"", 16, 8, 64, 64, 8))
    sequence = Sequence(7, Request("k", [1], 1, 8, sampling=worker_v1.SamplingParams()), 0, 0, [1])
    validator = ResponseValidator(worker_v1.StepRequest(epoch=1, generation=1), VOCAB)
    plan = plan_of(replica, sequence, is_new=True)
    validator.expect(plan)
    (row,) = validator.outcome_of(answer_to(plan), replica).results
    assert (list(row.token_ids), row.failure) == ([1], None)


def test_a_sequence_with_a_grammar_may_have_no_token() -> None:
    """While its grammar is compiled."""
    replica = Replica(ReplicaShape(b"", 16, 8, 64, 64, 8))
    sampling = worker_v1.SamplingParams(grammar='start: "a"', logprobs=1)
    sequence = Sequence(7, Request("k", [1], 1, 8, sampling=sampling), 0, 0, [1])
    validator = ResponseValidator(worker_v1.StepRequest(epoch=1, generation=1), VOCAB)
    plan = plan_of(replica, sequence, is_new=True)
    validator.expect(plan)
    response = answer_to(plan)
    response.result.num_tokens[:], response.result.token_ids[:] = [0], []
    (row,) = validator.outcome_of(response, replica).results
    assert (list(row.token_ids), row.failure) == ([], None)
