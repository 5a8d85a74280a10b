"""What events make of a request's log, where the contract tests' worker draws no such tokens."""

import pytest

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.beam_search import Choice
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.plan import MaxTokens, StopToken, TokensEvent
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.journal import Journal
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.live_requests import Graces, LiveRequests
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.unflushed_tokens import complete
from scheduler_svc.wire import attached_to_proto


class Gateway:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[scheduler_v1.Event] = []

    def send(self, message: scheduler_v1.SessionResponse) -> None:
        self.events += message.events

    def send_status(self, status: scheduler_v1.Status) -> None: ...


@pytest.fixture
def core() -> Scheduler:
    return Scheduler(SchedulerLimits())


@pytest.fixture
def requests(core: Scheduler) -> LiveRequests:
    store = RedisStore("redis://127.0.0.1:1/0")
    journal = Journal(store, 1, lambda: None, lambda log, index: None)
    return LiveRequests(core, journal, Graces(), lambda: None)


def started(requests: LiveRequests, **fields: object) -> LiveRequest:
    known = {"key": "k", "prompt_token_ids": [1, 2], "n": 2, "max_tokens": 3, "stop_token_ids": [9]}
    log = RequestLog(scheduler_v1.Submit(**(known | fields)), accepted_at=1.0)  # type: ignore[arg-type]
    complete(log)
    live = LiveRequest(log)
    assert requests.start(live, is_known=False) is None
    return live


def result(core: Scheduler, index: int, token_ids: list[int], score: float) -> TokensEvent:
    """What a search tells of one of its sequences."""
    request = core.sequences("k")[0].request
    sequence = Sequence(0, request, index, 0, [*request.prompt, *token_ids])
    sequence.num_cached = 0
    end = StopToken(9) if token_ids[-1] == 9 else MaxTokens()
    return TokensEvent(sequence, 0, token_ids, [Choice(-float(token), ()) for token in token_ids], end, score)


def test_the_results_of_a_search_are_told_at_once_and_kept(core: Scheduler, requests: LiveRequests) -> None:
    search = scheduler_v1.BeamSearch(width=2)
    live, gateway = started(requests, beam_search=search), Gateway()
    live.join(gateway)
    requests.dispatch([result(core, 0, [5, 6, 7], 0.5), result(core, 1, [8, 9], 0.25)])
    assert live.log.state is State.FINISHED
    assert requests.get("k") is None
    assert [event.tokens.index for event in gateway.events] == [0, 1]
    assert [list(event.tokens.token_ids) for event in gateway.events] == [[5, 6, 7], [8, 9]]
    replayed = attached_to_proto(live.log, 1).attached.sequences
    assert list(replayed) == [event.tokens for event in gateway.events]


def test_log_probabilities_are_kept_with_their_tokens(core: Scheduler, requests: LiveRequests) -> None:
    live = started(requests)
    for offset, token in enumerate((5, 6)):
        sequence = core.sequences("k")[1]
        requests.dispatch([TokensEvent(sequence, offset, [token], [worker_v1.TokenLogprobs(logprob=-token)])])
    assert [sequence.token_ids for sequence in live.log.sequences] == [[], [5, 6]]
    assert [told.logprob for told in live.log.sequences[1].logprobs] == [-5, -6]
    assert live.log.state is State.ACCEPTED
