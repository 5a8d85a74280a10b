"""The scheduler driven by hypothesis: after random actions, blocks and tokens are correct and nothing leaks."""

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

from audited_site import Site
from copy_fates import Fate, Fates
from core_bench import EMBEDDING
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import BeamParams, EarlyStopping, Request
from scheduler_svc.core.results import PROMPT_LOGPROBS, TOKENS, PromptComputation, ResultKind
from scheduler_world import World

MAX_SITES = 2
LULL = 10  # steps between two disruptions, so that there is something to disrupt
PLACES = st.integers(0, 1000)  # of something among those that there are
BITS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
BEAMS = st.builds(
    BeamParams, st.integers(2, 3), st.sampled_from([-1.0, 0.0, 1.0]), st.sampled_from(list(EarlyStopping))
)


# The same examples in each run, so a failure after a change is caused by the change. To search, use other seeds.
SETTINGS = settings(stateful_step_count=50, derandomize=True)


class CoreMachine(RuleBasedStateMachine):
    """A world and the actions in it. Few blocks, so that sequences soon compete for them."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.sampled_from([12, 20]),
        num_host_blocks=st.sampled_from([40, 40, 5, 0]),
        max_step_tokens=st.sampled_from([3, 32]),
        policy=st.sampled_from(["fair", "priority", "fcfs"]),
        preemption=st.sampled_from(list(PreemptionMode)),
        beginning=st.lists(st.integers(0, 1), min_size=16, max_size=16),
        computation=st.sampled_from(list(PromptComputation)),
    )
    def begin(
        self,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        max_step_tokens: int,
        policy: str,
        preemption: PreemptionMode,
        beginning: list[int],
        computation: PromptComputation,
    ) -> None:
        chunked = PromptComputation.CHUNKED
        self.shape = ReplicaShape(
            fingerprint=b"model",
            block_size=block_size,
            num_blocks=num_blocks,
            context_length=1000,
            max_step_tokens=max_step_tokens,
            max_sequences=6,
            num_host_blocks=num_host_blocks,
            block_bytes=1000,
            swap_bytes_per_second=1e8,
            prefill_tokens_per_second=1000.0,
            results={TOKENS.name: chunked, PROMPT_LOGPROBS.name: chunked, EMBEDDING.name: computation},
        )
        self.fates = Fates()
        queue = AdmissionLimits(max_requests=8)
        self.world = World(SchedulerLimits(queue=queue, policy=policy, preemption=preemption), self.fates)
        self.beginning = beginning
        self.num_quiet = 0  # steps since the last disruption
        self.join()

    # Requests.

    @rule(
        shared=st.integers(0, 16),
        own=BITS,
        max_tokens=st.one_of(st.integers(30, 60), st.integers(1, 60)),
        n=st.sampled_from([1, 1, 3]),
        beam=st.one_of(st.none(), st.none(), BEAMS),
        stops=st.booleans(),
        priority=st.integers(0, 1),
        tenant=st.sampled_from(["x", "y"]),
        time_left=st.one_of(st.none(), st.integers(1, 5)),
        result=st.sampled_from([TOKENS, TOKENS, PROMPT_LOGPROBS, EMBEDDING]),
    )
    def submit(
        self,
        shared: int,
        own: list[int],
        max_tokens: int,
        n: int,
        beam: BeamParams | None,
        stops: bool,
        priority: int,
        tenant: str,
        time_left: int | None,
        result: ResultKind,
    ) -> None:
        if result is EMBEDDING:
            n, max_tokens, beam, stops = 1, 1, None, False
        elif beam is not None:
            result = TOKENS
        capacity = self.shape.num_blocks * self.shape.block_size
        prompt = [*self.beginning[:shared], *own][: capacity - 1]
        now = self.world.now
        self.world.submit(
            Request(
                key=str(len(self.world.requests)),
                prompt=prompt,
                n=n if beam is None else 2,
                max_tokens=min(max_tokens, capacity - len(prompt)),
                stop_token_ids=frozenset({1} if stops else ()),
                min_tokens=3 if stops else 0,
                has_stop_strings=stops and beam is None,
                priority=priority,
                tenant=tenant,
                arrived_at=now,
                deadline=None if time_left is None else now + time_left,
                beam=beam,
                result=result,
            )
        )

    @precondition(lambda self: self.num_quiet >= LULL and any(self.world.scheduler.keys))
    @rule(place=PLACES)
    def cancel(self, place: int) -> None:
        self.num_quiet = 0
        keys = list(self.world.scheduler.keys)
        self.world.cancel(keys[place % len(keys)])

    @precondition(lambda self: self.num_quiet >= LULL and self.world.outputs)
    @rule(place=PLACES)
    def cut(self, place: int) -> None:
        self.num_quiet = 0
        outputs = list(self.world.outputs)
        key, index = outputs[place % len(outputs)]
        if self.world.requests[key].beam is None:
            self.world.stop(key, index)

    @rule()
    def acknowledge(self) -> None:
        for key, index in list(self.world.outputs):
            self.world.acknowledge(key, index)

    @precondition(lambda self: self.num_quiet >= LULL)
    @rule(seconds=st.integers(1, 3))
    def expire(self, seconds: int) -> None:
        self.num_quiet = 0
        self.world.wait(seconds)

    # Steps.

    @precondition(lambda self: self.world.sites)
    @rule(place=PLACES)
    def schedule(self, place: int) -> None:
        self.num_quiet += self.world.plan(self._site(place))

    @precondition(lambda self: self.world.sites)
    @rule(place=PLACES)
    def commit(self, place: int) -> None:
        self.world.commit(self._site(place))

    @precondition(lambda self: self.world.sites)
    @rule(place=PLACES, num_steps=st.integers(10, 40))
    def go_on(self, place: int, num_steps: int) -> None:
        """As usual with a worker: one step runs while the next one is planned."""
        site = self._site(place)
        for _ in range(num_steps):
            self.num_quiet += self.world.plan(site)
            self.world.check_integrity()
            if len(site.answers) > 1:
                self.world.commit(site)
                self.world.check_integrity()

    @rule(fate=st.sampled_from(list(Fate)))
    def let_copies(self, fate: Fate) -> None:
        self.fates.fate = fate

    # Replicas.

    @precondition(lambda self: len(self.world.sites) < MAX_SITES)
    @rule()
    def join(self) -> None:
        self.world.add_worker(self.shape)

    @precondition(lambda self: self.num_quiet >= LULL and self.world.sites)
    @rule(place=PLACES)
    def kill(self, place: int) -> None:
        self.num_quiet = 0
        self.world.lose(self._site(place))

    @precondition(lambda self: self.num_quiet >= LULL and self.world.sites)
    @rule(place=PLACES)
    def retire(self, place: int) -> None:
        self.num_quiet = 0
        self.world.retire(self._site(place))

    @rule()
    def part(self) -> None:
        self.world.remove_drained()

    @precondition(lambda self: self.num_quiet >= LULL)
    @rule()
    def restart_scheduler(self) -> None:
        self.num_quiet = 0
        self.world.restart()

    # Invariants. The sites check that no step writes what others read, that no block is allocated which a step
    # or a copy names, and that only committed blocks are published.

    @invariant()
    def blocks_have_their_owners(self) -> None:
        if hasattr(self, "world"):
            self.world.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.fates.fate = Fate.DONE
        if not self.world.working:
            self.join()
        self.world.drain()
        self.world.check_texts()
        self.world.check_nothing_is_left()

    def _site(self, place: int) -> Site:
        return self.world.sites[place % len(self.world.sites)]


@pytest.mark.parametrize("num_examples", [120, pytest.param(400, marks=pytest.mark.large)])
def test_blocks_and_tokens_are_right_whatever_is_done(num_examples: int) -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(SETTINGS, max_examples=num_examples))
