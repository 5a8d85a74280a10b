"""Live requests as a state machine: gateways, takeovers and a real Redis, in random order.

Every row of the transition table is reached. Any other pair of state and event raises.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from model_gateway import ModelGateway, UnsteadyStore
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from redis_server import redis_server
from scheduler_svc import live_request as live_request_module
from scheduler_svc.core.events import MaxTokens, TokensEvent
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import EngineSettings, SchedulerEngine
from scheduler_svc.live_state import TRANSITIONS, Graces, LiveEvent, LiveState, next_state
from scheduler_svc.request_log import RECORD_TRANSITIONS, RecordState, RequestLog
from shifted_loop import ShiftedLoop
from svc_common.transitions import IllegalTransition

MAX_TOKENS = 6
LULL = 3  # rules between two that end requests, so that there are requests to end
GRACES = Graces(detached=3000, broken=500, taken_over=200, unclaimed=1000)
KEYS = ["named", "unnamed"]
PLACES = st.integers(0, 1000)  # of one among those that exist
WITH_TIMEOUT = {LiveState.TAKEN_OVER, LiveState.UNCLAIMED, LiveState.DETACHED, LiveState.BROKEN}
RUNNING = {LiveState.STARTED, LiveState.ATTACHED, LiveState.DETACHED, LiveState.BROKEN}
# The same examples in each run, so a failure after a change is caused by the change.
SETTINGS = settings(stateful_step_count=50, derandomize=True, deadline=None)


class LiveMachine(RuleBasedStateMachine):
    """The requests of two keys, one of which clients can resume, and two gateways."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.loop = ShiftedLoop()
        self.store = UnsteadyStore(self.url)
        self.num_submitted = self.num_tokens = self.num_attachments = 0
        self.num_quiet = 0  # rules since a request was ended last
        self.epoch = 100
        self.errors: list[AssertionError] = []
        self.gateways = [ModelGateway({}, self.errors), ModelGateway({}, self.errors)]

    async def _never(self, epoch: int) -> int:
        raise AssertionError("no worker has a later epoch")

    def _fenced(self) -> None:
        raise AssertionError("no other scheduler leads")

    def _failed(self, error: Exception) -> None:
        raise AssertionError("a step stream failed") from error

    def run(self, action: Callable[[], object]) -> None:
        """Runs a function on the event loop, and everything that follows from it."""
        self.num_quiet += 1

        async def act() -> None:
            action()
            await asyncio.sleep(0)
            while self.engine._commands._queues._tasks:
                await asyncio.sleep(0.0005)
            await asyncio.sleep(0)

        self.loop.run_until_complete(act())

    @initialize()
    def begin(self) -> None:
        with redis.Redis.from_url(self.url) as keys:
            keys.flushall()
        self.take_over()

    # Gateways.

    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 1), submits=st.booleans())
    def join(self, key: str, number: int, submits: bool) -> None:
        """As a gateway does: what its clients have goes first, and is submitted again only where it is not known."""
        gateway = self.gateways[number]
        submission_id, tokens = gateway.known.get(key, ("", []))
        if submission_id and submission_id != self._submission_of(key) and key not in gateway.unknown:
            del gateway.known[key]  # that request is over, and another one has the key
            submission_id, tokens = "", []
        has_to_merge = bool(submission_id) and key not in gateway.attached
        if has_to_merge:
            submits = key in gateway.unknown
        elif submits:
            self.num_submitted += 1
            submission_id = str(self.num_submitted)
        unflushed = [scheduler_v1.UnflushedTokens(token_ids=tokens)] if has_to_merge else []
        gateway.unknown.discard(key)
        command_id = self.num_attachments = self.num_attachments + 1
        gateway.asked[command_id] = submission_id
        command = scheduler_v1.SessionRequest()
        if submits:
            command.submit.CopyFrom(self._submit(key, submission_id))
            command.submit.command_id = command_id
            command.submit.unflushed.extend(unflushed)
        else:
            command.attach.CopyFrom(scheduler_v1.Attach(key=key, command_id=command_id, unflushed=unflushed))
        self.run(lambda: self.engine.take(command, gateway))

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(number=st.integers(0, 1))
    def submit_beyond_a_gap(self, number: int) -> None:
        """The store has lost tokens before those that a gateway has: the request is refused once it is recorded."""
        self.num_submitted += 1
        was_live = self.engine.is_live("gap")  # the scheduler died before its end was recorded
        command_id = self.num_attachments = self.num_attachments + 1
        submit = self._submit("gap", str(self.num_submitted))
        submit.command_id = command_id
        submit.unflushed.add(offset=2, token_ids=[1])
        self.gateways[number].asked[command_id] = submit.submission_id
        self.run(lambda: self.engine.take(scheduler_v1.SessionRequest(submit=submit), self.gateways[number]))
        assert command_id not in self.gateways[number].asked
        assert self.engine.is_live("gap") is was_live

    def _submit(self, key: str, submission_id: str) -> scheduler_v1.Submit:
        return scheduler_v1.Submit(
            key=key,
            submission_id=submission_id,
            tenant="t",
            prompt_token_ids=[1, 2],
            n=1,
            max_tokens=MAX_TOKENS,
            detachable=key == "named",
            body_digest=b"body",
        )

    def _submission_of(self, key: str) -> str:
        """The submission that a command about the key would find."""
        found = self.engine.requests.get(key) or self.engine.requests.ended(key)
        if found is not None:
            return found.log.submit.submission_id
        with redis.Redis.from_url(self.url) as keys:
            return (keys.hget(f"{{quire}}:request:{key}", "submission_id") or b"").decode()

    @precondition(lambda self: self.num_quiet > LULL and any(gateway.attached for gateway in self.gateways))
    @rule(place=PLACES)
    def detach(self, place: int) -> None:
        self.num_quiet = 0
        pairs = [(gateway, key) for gateway in self.gateways for key in sorted(gateway.attached)]
        gateway, key = pairs[place % len(pairs)]
        gateway.attached.discard(key)
        gateway.known.pop(key)  # its clients left
        detach = scheduler_v1.Detach(key=key)
        self.run(lambda: self.engine.take(scheduler_v1.SessionRequest(detach=detach), gateway))

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(place=PLACES, attaches=st.sampled_from([True, True, False]))
    def reconnect(self, place: int, attaches: bool) -> None:
        self.num_quiet = 0
        numbers = [number for number in range(2) if self.gateways[number].attached] or [0, 1]
        self._reconnect(numbers[place % len(numbers)], attaches=attaches)

    @precondition(lambda self: self.num_quiet > LULL)
    @rule()
    def reconnect_all(self) -> None:
        """Also of a request that nobody can resume, since it has no name."""
        self.num_quiet = 0
        self.join("unnamed", 0, submits=True)
        self._reconnect(1, attaches=False)
        self._reconnect(0, attaches=True)

    def _reconnect(self, number: int, *, attaches: bool) -> None:
        gateway = self.gateways[number]
        self.run(lambda: self.engine.leave(gateway))
        self.gateways[number] = ModelGateway(gateway.known, self.errors)
        self.run(lambda: self.engine.join(self.gateways[number]))
        if attaches:
            self._attach_again(number)

    def _attach_again(self, number: int) -> None:
        for key in sorted(self.gateways[number].known):
            self.join(key, number, submits=False)

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 1))
    def cancel(self, key: str, number: int) -> None:
        self.num_quiet = 0
        cancel = scheduler_v1.Cancel(key=key)
        self.run(lambda: self.engine.take(scheduler_v1.SessionRequest(cancel=cancel), self.gateways[number]))

    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 1), num_tokens=st.integers(0, MAX_TOKENS))
    def finish(self, key: str, number: int, num_tokens: int) -> None:
        """A stop string is found in what the gateway's clients have. No other gateway has more."""
        gateway, other = self.gateways[number], self.gateways[1 - number]
        submission_id, tokens = gateway.known.get(key, ("", []))
        if key in other.known or len(tokens) < num_tokens:
            return
        del tokens[num_tokens:]
        gateway.attached.discard(key)
        finish = scheduler_v1.Finish(key=key, num_tokens=num_tokens, submission_id=submission_id)
        self.run(lambda: self.engine.take(scheduler_v1.SessionRequest(finish=finish), gateway))

    # Steps, time, the store.

    @precondition(lambda self: self._running)
    @rule(place=PLACES, num_tokens=st.sampled_from([1, 2, MAX_TOKENS]))
    def step(self, place: int, num_tokens: int) -> None:
        """A request gets tokens. Each is a new number, so that one that changes is noticed."""
        if not self._running:
            return
        live = self._running[place % len(self._running)]
        assert live.model is not None
        core, log = live.model.core, live.log
        (sequence,) = core.sequences(log.key)
        offset = len(log.sequences[0].token_ids)
        token_ids = [self.num_tokens + number for number in range(1, min(num_tokens, MAX_TOKENS - offset) + 1)]
        self.num_tokens += num_tokens
        end = MaxTokens() if offset + len(token_ids) == MAX_TOKENS else None
        if end is not None:
            core.cancel(log.key)  # as a commit does with a sequence that has ended
        self.run(lambda: self.engine.requests.dispatch([TokensEvent(sequence, offset, token_ids, end=end)]))

    @rule()
    def flush(self) -> None:
        self.store.is_away = False
        self.loop.run_until_complete(self.engine.journal.flush(30))

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(seconds=st.sampled_from([210.0, 210.0, 900.0, 3100.0]))
    def wait(self, seconds: float) -> None:
        self.num_quiet = 0
        self.loop.shift += seconds
        self.run(lambda: None)

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(is_away=st.booleans())
    def set_away(self, is_away: bool) -> None:
        self.store.is_away = is_away

    @rule()
    def take_over(self) -> None:
        """The scheduler dies with what it had not written, and another one takes over. No gateway dies with it."""
        self.store.is_away = False
        self.epoch += 1
        settings = EngineSettings(graces=GRACES)
        self.engine = SchedulerEngine(
            partial(Scheduler, SchedulerLimits()),
            self.store,
            self.epoch,
            settings,
            self._never,
            self._fenced,
            self._failed,
        )
        logs = self.loop.run_until_complete(self._live())
        self.run(lambda: self.engine.take_over(logs))
        self.gateways = [ModelGateway(gateway.known, self.errors) for gateway in self.gateways]
        for gateway in self.gateways:
            self.engine.join(gateway)

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(key=st.sampled_from(KEYS))
    def take_over_and_cancel(self, key: str) -> None:
        self.flush()
        self.take_over()
        self.cancel(key, 0)

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(num_tokens=st.sampled_from([1, MAX_TOKENS]))
    def take_over_late(self, num_tokens: int) -> None:
        """The gateways come back when requests that clients can resume have run without them, on other tokens."""
        for place in range(len(self._running)):
            self.step(place, 1)
        self.take_over()
        self.wait(210.0)
        for place in range(len(self._running)):
            self.step(place, num_tokens)
        for number in range(2):
            self._attach_again(number)

    async def _live(self) -> list[RequestLog]:
        return await self.store.live()

    @property
    def _running(self) -> list[live_request_module.LiveRequest]:
        return [live for live in self.engine.requests.all if live.is_running]

    # Invariants.

    @invariant()
    def states_agree_with_gateways_and_core(self) -> None:
        for error in self.errors:
            raise error
        if not hasattr(self, "engine"):
            return
        for live in self.engine.requests.all:
            assert live.state in RUNNING | {LiveState.TAKEN_OVER, LiveState.UNCLAIMED}
            assert live.state is not LiveState.STARTED, "it is attached or detached at once"
            assert bool(live.gateways) == (live.state is LiveState.ATTACHED)
            assert (live._timer is not None) == (live.state in WITH_TIMEOUT)
            assert live.model is not None
            assert live.model.core.is_live(live.log.key) == (live.state in RUNNING)
        for gateway in self.gateways:
            attached = {live.log.key for live in self.engine.requests.all if gateway in live.gateways}
            assert attached == gateway.attached

    def teardown(self) -> None:
        """Without gateways nothing runs forever, and the store has all tokens."""
        try:
            if hasattr(self, "engine"):
                self.store.is_away = False
                for gateway in list(self.engine._sessions):
                    self.run(lambda gateway=gateway: self.engine.leave(gateway))  # type: ignore[misc]
                for _ in range(3):
                    self.wait(3100.0)
                assert not list(self.engine.requests.all)
                assert self.loop.run_until_complete(self.engine.journal.flush(30))
                assert not self.loop.run_until_complete(self._live())
        finally:
            self.loop.run_until_complete(self.store.close())
            self.loop.close()


@pytest.mark.parametrize("num_examples", [120, pytest.param(300, marks=pytest.mark.large)])
def test_clients_keep_every_token_and_every_transition_is_reached(
    num_examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: set[tuple[LiveState, LiveEvent]] = set()

    def recording(state: LiveState, event: LiveEvent) -> LiveState:
        reached.add((state, event))
        return next_state(state, event)

    monkeypatch.setattr(live_request_module, "next_state", recording)
    monkeypatch.setattr("scheduler_svc.store.client._TURN_TIMEOUT", 30.0)  # Redis fails only where the test says so
    monkeypatch.setattr("scheduler_svc.recorder._FLUSH", 0.25)  # in vain only while the store is away
    with redis_server(tmp_path) as LiveMachine.url:
        run_state_machine_as_test(LiveMachine, settings=settings(SETTINGS, max_examples=num_examples))
        if reached != set(TRANSITIONS):  # some depend on how long Redis takes, and are rarer on a busy machine
            run_state_machine_as_test(LiveMachine, settings=settings(SETTINGS, max_examples=300))
    assert reached == set(TRANSITIONS)


def test_any_other_transition_raises() -> None:
    for state, event in set(itertools.product(LiveState, LiveEvent)) - set(TRANSITIONS):
        with pytest.raises(IllegalTransition, match=state.name):
            next_state(state, event)


@pytest.mark.parametrize("state", RecordState)
@pytest.mark.parametrize("after", RecordState)
def test_a_record_changes_only_by_its_table(state: RecordState, after: RecordState) -> None:
    log = RequestLog(scheduler_v1.Submit(key="k"), 1.0, record=state)
    if after is state or after in RECORD_TRANSITIONS[state]:
        log.set_record(after)
        assert log.record is after
    else:
        with pytest.raises(AssertionError, match=state.name):
            log.set_record(after)
        with suppress(AssertionError):
            log.set_record(after)
        assert log.record is state
