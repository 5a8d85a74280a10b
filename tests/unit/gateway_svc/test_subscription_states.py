"""Subscriptions as a state machine: events of readers, sessions and a model scheduler in random order.

Every row of the transition table is reached. Any other pair of state and event raises.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
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

from gateway_svc import request_errors
from gateway_svc import subscription as subscription_module
from gateway_svc.reader import ReaderAction, Release, StopFound
from gateway_svc.subscription_state import (
    TRANSITIONS,
    SubscriptionEvent,
    SubscriptionState,
    next_state,
)
from gateway_svc.subscriptions import Attachment, Subscriptions
from gateway_svc.validated_request import OnDisconnect
from model_scheduler import ModelScheduler
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from shifted_loop import ShiftedLoop
from svc_common.errors import QuireError
from svc_common.transitions import IllegalTransition

RECONNECT_SECONDS = 60.0
KEYS = st.sampled_from("ab")
PLACES = st.integers(0, 1000)  # picks one of the existing ones
REFUSALS = st.sampled_from([scheduler_v1.FAILURE_REASON_UNAVAILABLE, scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST])
LULL = 4  # number of rules between two that end requests, so that there are requests to end
AWAITING = {
    SubscriptionState.OPENING,
    SubscriptionState.JOINING,
    SubscriptionState.ATTACHING,
    SubscriptionState.RESUBMITTING,
}
WITHOUT_READERS = {SubscriptionState.IDLE, SubscriptionState.OPENING}
# The same examples in each run, so a failure after a change is caused by the change.
SETTINGS = settings(stateful_step_count=60, derandomize=True, deadline=None)


class ModelReader:
    """Checks that received tokens never change. A stop string is at `stops_at`, if that is reached."""

    def __init__(self, stops_at: int | None) -> None:
        self.tokens: list[int] = []
        self.is_done = False
        self.is_attached = False
        self._stops_at = stops_at
        self._is_truncated = False

    def field_path(self, which: str, item_index: int | None = None) -> str:
        return which

    def on_accepted(self, is_durable: bool) -> None:
        assert not self.is_done
        assert not self.tokens
        self.is_attached = True

    def on_attached(self, attached: scheduler_v1.Attached, *, is_durable: bool) -> Sequence[ReaderAction]:
        assert not self.is_done
        self.is_attached = True
        (tokens,) = attached.sequences
        num_common = min(len(self.tokens), len(tokens.token_ids))
        assert self.tokens[:num_common] == tokens.token_ids[:num_common], "tokens have changed"
        return self._extend(tokens)

    def on_tokens(self, tokens: scheduler_v1.Tokens) -> Sequence[ReaderAction]:
        assert not self.is_done
        assert self.is_attached, "tokens before the answer"
        assert tokens.offset <= len(self.tokens), "tokens are missing"
        return self._extend(tokens)

    def on_prompt_logprobs(self, prompt_logprobs: scheduler_v1.PromptLogprobs) -> None:
        raise AssertionError("no request here asks for these")

    def on_failed(self, error: QuireError) -> None:
        assert not self.is_done
        self.is_done = True

    def unflushed(self, offsets: Mapping[int, int]) -> list[scheduler_v1.UnflushedTokens]:
        offset = min(offsets.get(0, 0), len(self.tokens))
        return [
            scheduler_v1.UnflushedTokens(offset=offset, token_ids=self.tokens[offset:], is_truncated=self._is_truncated)
        ]

    def _extend(self, tokens: scheduler_v1.Tokens) -> Sequence[ReaderAction]:
        self.tokens += tokens.token_ids[len(self.tokens) - tokens.offset :]
        if self._stops_at is not None and len(self.tokens) >= self._stops_at:
            del self.tokens[self._stops_at :]
            self.is_done = self._is_truncated = True
            return (StopFound(0, self._stops_at), Release(None))
        if tokens.HasField("end"):
            self.is_done = True
            return (Release(None),)
        return ()


class SubscriptionMachine(RuleBasedStateMachine):
    """Subscriptions of two keys, and a scheduler that may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = ShiftedLoop()
        self.scheduler = ModelScheduler()
        self.is_open = False
        self.num_quiet = 0  # rules since the last request ended
        self.subscriptions = Subscriptions(self._send, RECONNECT_SECONDS, itertools.count(1))
        self.readers: list[tuple[ModelReader, Attachment]] = []

    def _send(self, command: scheduler_v1.SessionRequest) -> None:
        if self.is_open:
            self.scheduler.commands.append(command)

    def run(self, action: Callable[[], object]) -> None:
        """Runs a function on the event loop, and everything that is due by its clock."""
        self.num_quiet += 1

        async def act() -> None:
            action()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        self.loop.run_until_complete(act())
        self.readers = [(reader, attachment) for reader, attachment in self.readers if not reader.is_done]

    # Readers.

    @precondition(lambda self: len(self.readers) < 5)
    @rule(key=KEYS, submits=st.sampled_from([True, True, False]), has_deadline=st.booleans())
    def subscribe(self, key: str, submits: bool, has_deadline: bool) -> None:
        # Submissions under one key have the same body, so the same stop string.
        reader = ModelReader(2 if key == "b" else None)
        submit = scheduler_v1.Submit(key=key, model="tiny") if submits else None
        deadline = time.monotonic() + 1000 if has_deadline else None
        self.run(lambda: self.readers.append((reader, self.subscriptions.subscribe(key, submit, reader, deadline))))

    @precondition(lambda self: self.readers and self.num_quiet > LULL)
    @rule(place=PLACES, on_disconnect=st.sampled_from(OnDisconnect))
    def leave(self, place: int, on_disconnect: OnDisconnect) -> None:
        self.num_quiet = 0
        reader, attachment = self.readers.pop(place % len(self.readers))
        reader.is_done = True
        self.run(lambda: attachment.release(on_disconnect))

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(key=KEYS)
    def cancel(self, key: str) -> None:
        self.num_quiet = 0
        self.run(lambda: self.subscriptions.cancel(key))

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(seconds=st.sampled_from([RECONNECT_SECONDS + 1, 2000.0]))
    def wait(self, seconds: float) -> None:
        self.num_quiet = 0
        self.loop.shift += seconds
        self.run(lambda: None)

    @precondition(lambda self: not self.is_open)
    @rule(whose=st.sampled_from(["submissions", "attaches", "all"]))
    def give_up(self, whose: str) -> None:
        """The session times out: no scheduler is reachable."""
        self.num_quiet = 0
        error = request_errors.unavailable("no scheduler")
        match whose:
            case "submissions":
                self.run(lambda: self.subscriptions.give_up_submissions("tiny", error))
            case "attaches":
                self.run(lambda: self.subscriptions.give_up_attaches(error))
            case _:
                self.run(lambda: self.subscriptions.give_up(error))

    # The session.

    @initialize()
    def begin(self) -> None:
        self.open(has_model=True, is_store_degraded=False)

    @precondition(lambda self: not self.is_open)
    @rule(has_model=st.booleans(), is_store_degraded=st.booleans())
    def open(self, has_model: bool, is_store_degraded: bool) -> None:
        self.is_open = True
        self.run(self.subscriptions.open)
        self.set_models(has_model, is_store_degraded)

    @precondition(lambda self: self.is_open)
    @rule(has_model=st.sampled_from([True, True, False]), is_store_degraded=st.booleans())
    def set_models(self, has_model: bool, is_store_degraded: bool) -> None:
        models = {"tiny"} if has_model else set[str]()
        self.run(lambda: self.subscriptions.set_status(models, is_store_degraded=is_store_degraded))

    @precondition(lambda self: self.is_open and self.num_quiet > LULL)
    @rule(forgets=st.booleans(), loses_store=st.booleans())
    def lose(self, forgets: bool, loses_store: bool) -> None:
        self.is_open = False
        self.scheduler.restart(forgets=forgets, loses_store=loses_store)
        self.run(self.subscriptions.close)

    @precondition(lambda self: self.is_open)
    @rule(
        forgets=st.booleans(),
        loses_store=st.booleans(),
        has_model=st.sampled_from([True, True, False]),
        refusal=st.one_of(st.none(), REFUSALS),
        num_answers=st.integers(0, 3),
    )
    def fail_over(
        self,
        forgets: bool,
        loses_store: bool,
        has_model: bool,
        refusal: scheduler_v1.FailureReason | None,
        num_answers: int,
    ) -> None:
        """The next scheduler connects at once and sends its first answers. It may reject the last command."""
        self.lose(forgets, loses_store)
        self.open(has_model, is_store_degraded=False)
        for number in range(num_answers):
            self.scheduler.next_refusal = refusal if number == num_answers - 1 else None
            if self.scheduler.commands:
                self.handle_commands(1)
            if self.scheduler.events:
                self.deliver(1)

    @precondition(lambda self: self.is_open and self.num_quiet > LULL and self._growing)
    @rule(
        forgets=st.booleans(),
        has_model=st.booleans(),
        is_lost_too=st.booleans(),
        readers_leave=st.booleans(),
    )
    def fail_over_with_losses(self, forgets: bool, has_model: bool, is_lost_too: bool, readers_leave: bool) -> None:
        """The store has lost durable tokens or the request; then the next scheduler does not know them. It may have no
        model for the request, and may be lost in its turn. Readers may leave while the request is submitted again."""
        self.stream(0, is_flushed=True)
        self.lose(forgets, loses_store=True)
        self.open(has_model, is_store_degraded=False)
        if forgets and not has_model:
            self._settle()
            if is_lost_too:
                self.lose(forgets, loses_store=True)
                self.open(has_model, is_store_degraded=False)
            else:
                self.wait(RECONNECT_SECONDS + 1)
        elif forgets:
            while self.scheduler.commands:
                self.handle_commands(1)
            while self.scheduler.events:
                self.deliver(1)
            while readers_leave and self.readers:
                self.leave(0, OnDisconnect.DETACH)
            self.scheduler.next_refusal = scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
        self._settle()

    # The scheduler.

    @rule()
    def exchange(self) -> None:
        """Delivers all messages."""
        self._settle()

    @precondition(lambda self: self.scheduler.commands)
    @rule(num_commands=st.integers(1, 3))
    def handle_commands(self, num_commands: int) -> None:
        for _ in range(min(num_commands, len(self.scheduler.commands))):
            self.scheduler.handle_command()

    @precondition(lambda self: self.scheduler.events)
    @rule(num_events=st.integers(1, 5))
    def deliver(self, num_events: int) -> None:
        for _ in range(min(num_events, len(self.scheduler.events))):
            event = self.scheduler.events.popleft()
            self.run(lambda event=event: self.subscriptions.dispatch(event))  # type: ignore[misc]

    @precondition(lambda self: self._growing)
    @rule(place=PLACES, is_flushed=st.booleans())
    def grow(self, place: int, is_flushed: bool) -> None:
        key = self._growing[place % len(self._growing)]
        self.scheduler.grow(key)
        if is_flushed:
            self.scheduler.flush(key)

    @precondition(lambda self: self._growing)
    @rule(place=PLACES, is_flushed=st.sampled_from([True, True, False]))
    def stream(self, place: int, is_flushed: bool) -> None:
        """The usual case: readers receive a token, and then that it is durable."""
        self.grow(place, is_flushed)
        self._settle()

    @precondition(lambda self: self._growing and self.num_quiet > LULL)
    @rule(place=PLACES)
    def fail(self, place: int) -> None:
        self.num_quiet = 0
        key = self._growing[place % len(self._growing)]
        self.scheduler.fail(key, scheduler_v1.FAILURE_REASON_UNAVAILABLE)

    @precondition(lambda self: self.num_quiet > LULL)
    @rule(reason=REFUSALS)
    def refuse_next(self, reason: scheduler_v1.FailureReason) -> None:
        self.num_quiet = 0
        self.scheduler.next_refusal = reason

    @property
    def _growing(self) -> list[str]:
        requests = self.scheduler.requests
        return [key for key, request in requests.items() if request.end is None and not request.awaits_gateway]

    # Invariants.

    @invariant()
    def states_agree_with_readers(self) -> None:
        for subscription in self.subscriptions._subscriptions.values():
            assert (subscription.command_id is not None) == (subscription.state in AWAITING)
            assert (not subscription.subscribers) == (subscription.state in WITHOUT_READERS)
            assert subscription.state is not SubscriptionState.CLOSED
            assert subscription.subscribers or subscription.waiting

    def teardown(self) -> None:
        """With a session and a model no reader waits forever, and the scheduler knows which requests have readers."""
        try:
            self.scheduler.next_refusal = None
            if not self.is_open:
                self.open(has_model=True, is_store_degraded=False)
            self.set_models(has_model=True, is_store_degraded=False)
            self._settle()
            attached = {key for key, request in self.scheduler.requests.items() if request.is_attached}
            assert attached == set(self.subscriptions._subscriptions)
            states = {subscription.state for subscription in self.subscriptions._subscriptions.values()}
            assert states <= {SubscriptionState.ATTACHED}
            assert all(reader.is_attached for reader, _ in self.readers)
            while self.readers:
                self.leave(0, OnDisconnect.DETACH)
            self._settle()
            assert not self.subscriptions._subscriptions
            assert not any(request.is_attached for request in self.scheduler.requests.values())
        finally:
            self.loop.close()

    def _settle(self) -> None:
        for _ in range(1000):
            if self.scheduler.commands:
                self.handle_commands(1)
            elif self.scheduler.events:
                self.deliver(1)
            else:
                return
        raise AssertionError("commands and events do not end")


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> set[tuple[SubscriptionState, SubscriptionEvent]]:
    pairs: set[tuple[SubscriptionState, SubscriptionEvent]] = set()

    def recording(state: SubscriptionState, event: SubscriptionEvent) -> SubscriptionState:
        pairs.add((state, event))
        return next_state(state, event)

    def unexpected(message: str) -> QuireError:
        raise AssertionError(message)

    monkeypatch.setattr(subscription_module, "next_state", recording)
    monkeypatch.setattr("gateway_svc.request_errors.internal", unexpected)
    return pairs


@pytest.mark.parametrize("num_examples", [400, pytest.param(800, marks=pytest.mark.large)])
def test_readers_get_every_token_once_and_every_transition_is_reached(
    reached: set[tuple[SubscriptionState, SubscriptionEvent]], num_examples: int
) -> None:
    run_state_machine_as_test(SubscriptionMachine, settings=settings(SETTINGS, max_examples=num_examples))
    assert reached == set(TRANSITIONS)


def test_any_other_transition_raises() -> None:
    for state, event in set(itertools.product(SubscriptionState, SubscriptionEvent)) - set(TRANSITIONS):
        with pytest.raises(IllegalTransition, match=state.value):
            next_state(state, event)
