"""Events of the core in a request's log, for tokens that the contract tests' worker does not sample."""

import asyncio
import time
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core_bench import SHAPE, keys
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.beam_search import Choice
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.events import Failure, MaxTokens, PromptLogprobsEvent, StopToken, TokensEvent, ValueComputed
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.fcfs import FcfsPolicy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.journal import Journal
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.live_state import Graces, LiveState
from scheduler_svc.model_versions import ModelVersion, ModelVersions
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.session_wire import attached_message
from scheduler_svc.spending import Spending
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.unflushed_tokens import complete


class Gateway(GatewaySession):
    """Keeps the events that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[scheduler_v1.Event] = []

    def send(self, message: scheduler_v1.SessionResponse, *, delay: float = 0.0) -> None:
        self.events += message.events


@pytest.fixture
def core() -> Scheduler:
    return Scheduler(SchedulerLimits())


def live_requests(core: Scheduler, graces: Graces) -> LiveRequests:
    store = RedisStore("redis://127.0.0.1:1/0")
    journal = Journal(store, 1, lambda: None, lambda log, index: None, Spending(Budgets()))
    return LiveRequests(ModelVersions(lambda: core, 60), journal, graces)


@pytest.fixture
def requests(core: Scheduler) -> LiveRequests:
    return live_requests(core, Graces())


def started(requests: LiveRequests, **fields: object) -> LiveRequest:
    known = {"key": "k", "prompt_token_ids": [1, 2], "n": 2, "max_tokens": 3, "stop_token_ids": [9]}
    log = RequestLog(scheduler_v1.Submit(**(known | fields)), accepted_at=1.0)  # type: ignore[arg-type]
    complete(log)
    live = LiveRequest(log)
    assert requests.start(live, is_restored=False) is None
    return live


async def test_spans_of_requests_in_progress_end_with_the_term(
    requests: LiveRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("scheduler_svc.tracing.tracer", lambda: provider.get_tracer("test"))
    started(requests, traceparent=f"00-{1:032x}-{2:016x}-01")
    started(requests, key="not traced")
    requests.end_traces()
    (span,) = exporter.get_finished_spans()
    assert (span.name, dict(span.attributes or {})["quire.state"]) == ("scheduler.queued", "handed_over")


async def test_requests_of_an_earlier_term_queue_in_the_order_in_which_they_were_accepted() -> None:
    """They are attached in another order. One with tokens that was accepted first gets the only slot."""
    core = Scheduler(SchedulerLimits(max_sequences=1))
    requests = live_requests(core, Graces())
    now = time.time()
    for key, age in (("third", 1.0), ("second", 2.0), ("first", 20.0)):
        submit = scheduler_v1.Submit(key=key, tenant="t", prompt_token_ids=[1, 2], n=1, max_tokens=30)
        log = RequestLog(submit, accepted_at=now - age)
        complete(log)
        if key == "first":
            log.sequences[0].token_ids += range(3, 23)
        requests.take_over(log)
        live = requests.get(key)
        assert live is not None
        assert requests.start(live, is_restored=True) is None
    replica = Replica(SHAPE)
    core.add_replica(replica)
    plan = core.schedule(replica, time.monotonic())
    assert plan is not None
    assert keys(plan) == ["first"]
    order = sorted(("second", "third"), key=lambda key: core.waiting.num_ahead(core.sequences(key)[0], 0, 0.0) or 0)
    assert order == ["second", "third"]


def result(core: Scheduler, index: int, token_ids: list[int], score: float) -> TokensEvent:
    """The event of one sequence of a search."""
    request = core.sequences("k")[0].request
    sequence = Sequence(0, request, index, 0, [*request.prompt, *token_ids])
    sequence.num_cached_prompt_tokens = 0
    end = StopToken(9) if token_ids[-1] == 9 else MaxTokens()
    return TokensEvent(sequence, 0, token_ids, [Choice(-float(token), ()) for token in token_ids], end, score)


def test_the_results_of_a_search_are_sent_at_once_and_kept(core: Scheduler, requests: LiveRequests) -> None:
    search = scheduler_v1.BeamSearch(width=2)
    live, gateway = started(requests, beam_search=search), Gateway()
    requests.attach(live, gateway)
    requests.dispatch([result(core, 0, [5, 6, 7], 0.5), result(core, 1, [8, 9], 0.25)])
    assert live.log.state is State.FINISHED
    assert requests.get("k") is None
    assert [event.tokens.index for event in gateway.events] == [0, 1]
    assert [list(event.tokens.token_ids) for event in gateway.events] == [[5, 6, 7], [8, 9]]
    replayed = attached_message(0, live.log, 1).events[0].attached.sequences
    assert list(replayed) == [event.tokens for event in gateway.events]


def test_log_probabilities_are_kept_with_their_tokens(core: Scheduler, requests: LiveRequests) -> None:
    live = started(requests)
    for offset, token in enumerate((5, 6)):
        sequence = core.sequences("k")[1]
        requests.dispatch([TokensEvent(sequence, offset, [token], [worker_v1.TokenLogprobs(logprob=-token)])])
    assert [sequence.token_ids for sequence in live.log.sequences] == [[], [5, 6]]
    assert [one.logprob for one in live.log.sequences[1].logprobs] == [-5, -6]
    assert live.log.state is State.ACCEPTED


def prompt_logprobs(*values: float) -> list[worker_v1.TokenLogprobs]:
    return [worker_v1.TokenLogprobs(logprob=value) for value in values]


ASKS_FOR_PROMPT = worker_v1.ResultKind(prompt_logprobs=worker_v1.PromptLogprobsResult())


def test_log_probabilities_of_a_prompt_are_sent_and_kept(core: Scheduler, requests: LiveRequests) -> None:
    live, gateway = started(requests, prompt_token_ids=[1, 2, 3], result=ASKS_FOR_PROMPT), Gateway()
    requests.attach(live, gateway)
    request = core.sequences("k")[0].request
    requests.dispatch([PromptLogprobsEvent(request, 1, prompt_logprobs(-1.0))])
    requests.dispatch([PromptLogprobsEvent(request, 2, prompt_logprobs(-2.0))])
    assert live.log.prompt_logprobs == prompt_logprobs(-1.0, -2.0)
    assert [event.prompt_logprobs.offset for event in gateway.events] == [1, 2]


def test_a_gateways_prompt_logprobs_are_sent_to_others_and_not_computed_again(
    core: Scheduler, requests: LiveRequests
) -> None:
    live, other = started(requests, prompt_token_ids=[1, 2, 3], result=ASKS_FOR_PROMPT), Gateway()
    requests.attach(live, other)
    requests.dispatch([PromptLogprobsEvent(core.sequences("k")[0].request, 1, prompt_logprobs(-1.0))])
    held = scheduler_v1.UnflushedTokens(prompt_logprobs=prompt_logprobs(-9.0, -2.0))
    assert requests.resume_request(live, [held], is_new=False) is None
    assert live.log.prompt_logprobs == prompt_logprobs(-1.0, -2.0)
    assert [event.prompt_logprobs.offset for event in other.events] == [1, 2]
    assert [sequence.num_prompt_logprobs for sequence in core.sequences("k")] == [2, 2]


def test_a_value_ends_its_request_and_is_replayed(core: Scheduler, requests: LiveRequests) -> None:
    fields = {"n": 1, "max_tokens": 0, "stop_token_ids": [], "result": worker_v1.ResultKind()}
    fields["result"].embedding.SetInParent()  # type: ignore[attr-defined]
    live, gateway = started(requests, **fields), Gateway()
    requests.attach(live, gateway)
    sequence = core.sequences("k")[0]
    sequence.num_cached_prompt_tokens = 1
    value = worker_v1.PromptValue(numbers=[1.5])
    requests.truncate(live, 0, 0)  # a stop match, which is about tokens
    requests.dispatch([TokensEvent(sequence, 0, (), end=ValueComputed(value))])
    assert live.log.state is State.FINISHED
    [sent] = [event.tokens for event in gateway.events]
    assert sent.end.value == value
    assert list(attached_message(0, live.log, 1).events[0].attached.sequences) == [sent]


class BrokenPolicy(FcfsPolicy):
    """A policy of another package, with a defect."""

    def add(self, sequence: Sequence, now: float) -> None:
        raise RuntimeError("a defect")


@pytest.mark.parametrize("is_restored", [False, True])
async def test_a_request_at_which_the_policy_raises_fails(is_restored: bool) -> None:
    core = Scheduler(SchedulerLimits(make_policy=BrokenPolicy))
    requests = live_requests(core, Graces())
    submit = scheduler_v1.Submit(key="k", prompt_token_ids=[1, 2], n=2, max_tokens=3)
    log = RequestLog(submit, accepted_at=1.0)
    complete(log)
    live = LiveRequest(log)
    if is_restored:
        requests.take_over(log)
        found = requests.get("k")
        assert found is not None
        live = found
    refused = requests.start(live, is_restored=is_restored)
    assert refused is not None
    assert refused.reason is Failure.INTERNAL
    assert requests.get("k") is None
    assert live.log.state is State.FAILED
    assert not core.is_live("k")
    assert core.num_queued == core.waiting.admission.num_requests == 0


async def test_a_detached_request_that_moves_to_another_version_keeps_its_grace(core: Scheduler) -> None:
    requests = live_requests(core, Graces(detached=0.05))
    live, gateway = started(requests, detachable=True, has_stop_strings=True), Gateway()
    requests.attach(live, gateway)
    requests.leave(live, gateway, has_broken=False)
    assert live.model is not None
    requests.move(live.model)
    assert live.state is LiveState.DETACHED
    assert all(one.num_acknowledged == one.request.max_tokens for one in core.sequences("k"))
    async with asyncio.timeout(60):
        while live.state is LiveState.DETACHED:
            await asyncio.sleep(0.01)
    assert live.log.state is State.CANCELLED


async def test_of_requests_that_have_ended_only_those_are_kept_that_the_store_is_to_know(
    requests: LiveRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away."""
    monkeypatch.setattr("scheduler_svc.journal._MAX_KEPT", 3 * 1024 + 500)
    for key in ("first", "second"):
        requests.cancel(started(requests, key=key))
    unrecorded = scheduler_v1.Retention(is_unrecorded=True)
    requests.cancel(started(requests, key="unrecorded", retention=unrecorded, attachment=bytes(1000)))
    assert requests.ended("unrecorded") is None
    assert requests.attachments.num_bytes == 0
    assert requests.ended("first") is not None
    requests.cancel(started(requests, key="large", attachment=bytes(8 * 2000)))
    assert not await requests._journal.flush(0.01)
    requests.cancel(started(requests, key="last"))
    kept = [key for key in ("first", "second", "large", "last") if requests.ended(key) is not None]
    assert kept == ["large", "last"]
    assert requests.attachments.num_bytes == 8 * 2000


async def test_a_request_that_is_too_long_for_a_new_version_runs_on_the_last_worker_of_the_old_one() -> None:
    journal = Journal(
        RedisStore("redis://127.0.0.1:1/0"), 1, lambda: None, lambda log, index: None, Spending(Budgets())
    )
    models = ModelVersions(lambda: Scheduler(SchedulerLimits()), 60)
    requests = LiveRequests(models, journal, Graces())

    def join(fingerprint: bytes, context_length: int) -> tuple[ModelVersion, Replica]:
        description = worker_v1.DescribeResponse(model="m", fingerprint=fingerprint)
        version = models.for_worker(description, "", 0.0)
        replica = Replica(replace(SHAPE, fingerprint=fingerprint, context_length=context_length))
        version.add_worker(replica, asyncio.Event(), description)
        version.core.add_replica(replica)
        return version, replica

    old, last = join(b"old", 100)
    long, short = (started(requests, key=key, model="m", max_tokens=num) for key, num in (("long", 50), ("short", 5)))
    new, _ = join(b"new", 40)
    last.is_retired = True
    requests.move(old)
    old.core.supersede()
    assert (long.model, long.is_running, short.model) == (old, True, new)
    plan = old.core.schedule(last, time.monotonic())
    assert plan is not None
    assert keys(plan) == ["long"]
    # Without a worker of the old version it ends where the context of the new one does.
    old.core.remove_replica(last)
    old.remove_worker(last, time.monotonic())
    requests.move(old)
    assert (long.model, long.is_running) == (new, True)
    assert [one.max_tokens for one in new.core.sequences("long")] == [40 - len(long.log.submit.prompt_token_ids)] * 2
