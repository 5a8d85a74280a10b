"""A replica: one worker's KV memory, the sequences that are on it, and its steps in flight."""

from bisect import insort
from collections import Counter

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.kv.block_tier import BlockTier
from scheduler_svc.core.kv.manager import KVManager
from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Phase, Sequence
from scheduler_svc.core.step import MemoryPressure, StepPlan, SwapDone


class Replica:
    """Sequences of one worker, for as long as its step stream lives.

    A sequence that holds a slot, so that steps may compute it, is in one of three lists:
    - `running`, in the order of `Sequence.order`;
    - `indivisible`: its prompt is computed in one step, with which it ends. It is preempted only by `drain()`;
    - `isolated`: it is suspected of crashing workers, and runs in steps of its own. It is preempted only if
      its own blocks cannot be found otherwise.
    One that is SWAPPED is in `swapped`, in the same order; one that left while steps in flight name it, in
    `pending_free`.
    """

    def __init__(self, shape: ReplicaShape, name: str = "") -> None:
        """`name` is the worker's, for the operator."""
        self.shape = shape
        self.name = name
        self.costs = CostModel(shape.block_bytes, shape.swap_bytes_per_second, shape.prefill_tokens_per_second)
        device, host = (BlockTier(count, shape.block_size) for count in (shape.num_blocks, shape.num_host_blocks))
        self.kv = KVManager(shape, self.costs, device, host)
        self.running: list[Sequence] = []
        self.indivisible: list[Sequence] = []
        self.isolated: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.pending_free: dict[int, Sequence] = {}
        self.steps_in_flight: list[StepPlan] = []
        self.num_steps = 0
        self.num_slots = 0  # that sequences hold; a beam search holds as many as it is wide
        self.num_slots_of: Counter[str] = Counter()  # the same, by tenant
        self.searches: dict[str, list[Sequence]] = {}  # the beams here that hold slots, by their request
        self.is_retired = False  # it is given no new sequences, unless it `is_last`
        self.is_last = False  # all replicas of its core are retired, and no other one will come
        self.is_indivisible_due = False  # the next step begins with one that did not fit with others
        self.finished_ids: list[int] = []  # sequences that the worker forgets with the next step
        self.memory_pressure = MemoryPressure.NONE
        self.has_new_pressure = False  # measured since it was looked at last
        self.must_discard = False  # the next step returns the memory of free blocks

    @property
    def is_idle(self) -> bool:
        """Whether it has no sequence and no step in flight."""
        return not (self.num_running or self.swapped or self.pending_free or self.steps_in_flight)

    @property
    def admits(self) -> bool:
        """Whether it is given queued sequences."""
        return not self.is_retired or self.is_last

    @property
    def num_running(self) -> int:
        """Sequences that steps may compute."""
        return len(self.running) + len(self.indivisible) + len(self.isolated)

    @property
    def kept(self) -> list[Sequence]:
        """Sequences without a slot whose blocks are all on the device."""
        return [s for s in self.swapped if s.swapped_kv is not None and s.swapped_kv.is_kept]

    @property
    def has_returning(self) -> bool:
        """Whether a sequence without a slot waits here for room only: its account can pay for it."""
        return any(sequence.can_pay for sequence in self.swapped)

    @property
    def num_pending_free(self) -> int:
        """Blocks that will be available once the steps and copies in progress are done."""
        tables = [sequence.block_ids for sequence in self.pending_free.values()]
        return self.kv.num_pending_free([*tables, *(plan.held_block_ids for plan in self.steps_in_flight)])

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the memory of its machine or container is short."""
        return self.memory_pressure is not MemoryPressure.NONE

    @property
    def may_swap_out(self) -> bool:
        """Whether blocks may be copied to the host: there are host blocks, and they take no memory that is short."""
        return self.shape.num_host_blocks > 0 and not (self.shape.has_kv_in_host_memory and self.is_short_of_memory)

    def note_pressure(self, pressure: MemoryPressure) -> None:
        """The worker has measured its memory."""
        self.memory_pressure = pressure
        self.has_new_pressure = True

    @property
    def has_pending_updates(self) -> bool:
        """Whether the next step must carry something besides tokens to compute: ids of finished sequences, swaps, or
        blocks to discard.
        """
        return bool(self.finished_ids) or self.kv.swaps.has_waiting or self.must_discard

    @property
    def has_work(self) -> bool:
        """Whether the replica may need a step even if no request is queued.

        An indivisible prompt needs no further step while the one that computes it is in flight.
        """
        if self.running or self.isolated or self.swapped or self.has_pending_updates or self.has_new_pressure:
            return True
        return len(self.kv.swaps) > 0 or any(not sequence.num_steps_in_flight for sequence in self.indivisible)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence is on this replica. O(sequences that run)."""
        if sequence.phase in (Phase.RUNNING, Phase.SWAPPING_IN):
            return sequence in self.running or sequence in self.indivisible or sequence in self.isolated
        return sequence in self.swapped or self.pending_free.get(sequence.id) is sequence

    def prompt_seconds(self, sequence: Sequence) -> float:
        """How long the known tokens of a queued sequence take here alone, without those that are cached."""
        num_known = len(sequence.tokens)
        num_found = min(self.kv.num_cached_blocks(sequence) * self.shape.block_size, num_known - 1)
        return self.costs.recompute_seconds(num_known - num_found, num_found)

    # Sequences are admitted.

    def admit(self, sequence: Sequence, hit: Hit) -> None:
        """Runs a queued sequence with what `kv.match` found. There is room. Its last token is left to compute."""
        if self.shape.is_indivisible(sequence.request):
            self._admit_indivisible(sequence)
            return
        self.kv.reuse(sequence, hit)
        self._enter(sequence, sequence.num_cached_tokens)

    def _admit_indivisible(self, sequence: Sequence) -> None:
        """All its blocks are allocated at once, so that nothing keeps it from being computed."""
        sequence.num_steps = 0
        sequence.num_sent_blocks = None
        if not self.shape.is_without_kv(sequence.request):
            self.kv.reuse(sequence, Hit([]))
            self.kv.allocate(sequence, self.shape.num_blocks_for(len(sequence.tokens)))
        sequence.set_phase(Phase.RUNNING)
        self._take_slots(sequence)
        self.indivisible.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Swaps a sequence in. There is room."""
        self.swapped.remove(sequence)
        self._enter(sequence, self.kv.swap_in(sequence))

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Runs a new beam that begins with `parent`'s first `num_tokens` tokens, which are computed. There is room."""
        self.kv.fork(parent, child, num_tokens)
        self._enter(child, child.num_cached_tokens)
        child.num_steps = parent.num_steps
        if parent in self.isolated:
            self.isolate(child)

    def _enter(self, sequence: Sequence, num_cached_tokens: int) -> None:
        sequence.num_computed = sequence.num_committed = min(num_cached_tokens, len(sequence.tokens) - 1)
        sequence.num_steps = 0
        sequence.num_sent_blocks = None
        sequence.set_phase(Phase.SWAPPING_IN if self.kv.is_swapping_in(sequence) else Phase.RUNNING)
        self._take_slots(sequence)
        insort(self.running, sequence, key=lambda s: s.order)

    def _take_slots(self, sequence: Sequence) -> None:
        """The first beam of a search takes the slots of all."""
        request = sequence.request
        if request.beam is not None:
            beams = self.searches.setdefault(request.key, [])
            beams.append(sequence)
            if len(beams) > 1:
                return
        self.num_slots += request.num_slots
        self.num_slots_of[request.tenant] += request.num_slots

    def _release_slots(self, sequence: Sequence) -> None:
        """The last beam of a search releases the slots of all."""
        request = sequence.request
        if request.beam is not None:
            self.searches[request.key].remove(sequence)
            if self.searches[request.key]:
                return
            del self.searches[request.key]
        self.num_slots -= request.num_slots
        self.num_slots_of[request.tenant] -= request.num_slots
        if not self.num_slots_of[request.tenant]:
            del self.num_slots_of[request.tenant]

    def isolate(self, sequence: Sequence) -> None:
        """Moves a sequence that runs to `isolated`."""
        (self.indivisible if sequence in self.indivisible else self.running).remove(sequence)
        self.isolated.append(sequence)

    def end_isolation(self, sequence: Sequence) -> None:
        """Moves a sequence back among those that run together."""
        self.isolated.remove(sequence)
        if self.shape.is_indivisible(sequence.request):
            self.indivisible.append(sequence)
        else:
            insort(self.running, sequence, key=lambda s: s.order)

    def rename(self, sequence: Sequence, sequence_id: int) -> None:
        """Gives a sequence that no step names another id. To the worker it is another sequence, with other tokens."""
        self._send_finished(sequence)
        self.kv.cancel_table_updates(sequence)
        sequence.num_sent_blocks = None
        sequence.id = sequence_id

    # Sequences leave.

    def leave(self, sequence: Sequence, phase: Phase) -> None:
        """Takes a sequence out of further steps, to the given phase. Steps in flight keep its blocks."""
        next(group for group in (self.running, self.indivisible, self.isolated) if sequence in group).remove(sequence)
        self._release_slots(sequence)
        self._send_finished(sequence)
        self.kv.detach(sequence, self.steps_in_flight)
        sequence.set_phase(phase)
        self.pending_free[sequence.id] = sequence
        self.free_if_idle(sequence)

    def free_if_idle(self, sequence: Sequence) -> bool:
        """Releases the blocks of a leaving sequence once no step in flight names them; whether that is done."""
        if sequence.num_steps_in_flight or sequence.id not in self.pending_free:
            return False
        del self.pending_free[sequence.id]
        self.kv.free(sequence)
        return True

    def keep_swapped(self, sequence: Sequence) -> None:
        """A preempted sequence whose KV is on the host waits here."""
        sequence.set_phase(Phase.SWAPPED)
        insort(self.swapped, sequence, key=lambda s: s.order)

    def restore_table(self, sequence: Sequence) -> None:
        """Gives a sequence that kept its blocks their table again, so that they can be swapped out or freed."""
        sequence.num_computed = sequence.num_committed = self.kv.swap_in(sequence)

    def free_table(self, sequence: Sequence) -> None:
        """Frees the blocks of a restored table. A sequence that was not swapped out is in no list any more."""
        if sequence.swapped_kv is None:
            self.swapped.remove(sequence)
        self.kv.free(sequence)

    def drop_swapped(self, sequence: Sequence) -> None:
        """Frees the swapped KV of a sequence."""
        self.kv.drop_swapped(sequence)
        if sequence.phase is Phase.SWAPPED:
            self.swapped.remove(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence that runs here, leaves or is swapped."""
        if sequence.phase in (Phase.RUNNING, Phase.SWAPPING_IN):
            self.leave(sequence, Phase.ENDED)
            return
        if sequence.swapped_kv is not None:
            self.drop_swapped(sequence)
        sequence.set_phase(Phase.ENDED)

    def _send_finished(self, sequence: Sequence) -> None:
        if sequence.num_sent_blocks is not None:
            self.finished_ids.append(sequence.id)

    def abandon(self) -> list[Sequence]:
        """The worker is lost. Returns its sequences that have not ended, without blocks."""
        for plan in self.steps_in_flight:
            for part in plan.scheduled:
                part.settle(0)
        self.steps_in_flight.clear()
        self.num_slots = 0
        self.num_slots_of.clear()
        self.searches.clear()
        running = [*self.running, *self.indivisible, *self.isolated]
        sequences = [*running, *self.pending_free.values(), *self.swapped]
        for sequence in sequences:
            sequence.num_steps_in_flight = sequence.num_promised = sequence.num_extra = 0
            sequence.swapped_kv = None
            sequence.forget_blocks()
        return [sequence for sequence in sequences if sequence.phase is not Phase.ENDED]

    # Steps.

    def start_step(self, plan: StepPlan) -> None:
        """Puts a step in flight."""
        self.kv.start_step(plan)
        if self.must_discard:
            self.must_discard = False
            plan.discarded_block_ids.extend(self.kv.device.pool.discard_free())
            plan.discarded_host_block_ids.extend(self.kv.host.pool.discard_free())
        self.finished_ids = []
        self.steps_in_flight.append(plan)

    def finish_step(self, pressure: MemoryPressure | None = None) -> StepPlan:
        """Takes the oldest step out of flight. `pressure` is what its outcome reports."""
        plan = self.steps_in_flight.pop(0)
        if pressure is not None:
            self.note_pressure(pressure)
        self.kv.finish_step(plan)
        return plan

    def publish(self, sequence: Sequence) -> None:
        """Puts the blocks that a sequence's committed steps have filled into the prefix cache."""
        if sequence.num_committed // self.shape.block_size > sequence.num_published:
            self.kv.publish(sequence, self.steps_in_flight[-1] if self.steps_in_flight else None)

    def finish_swap(self, done: SwapDone) -> list[Sequence]:
        """A transfer is done, or it failed. Returns the sequences that must be computed again."""
        result = self.kv.finish_swap(done)
        for sequence in result.arrived:
            sequence.set_phase(Phase.RUNNING)
        for sequence in result.lost:
            if sequence.phase is Phase.SWAPPED:
                self.swapped.remove(sequence)
        # A preempted one that steps in flight name is queued again when they are done.
        return [sequence for sequence in result.lost if sequence.phase is not Phase.PREEMPTED]

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, phases and steps in flight agree."""
        present = [*self.running, *self.indivisible, *self.isolated]
        leaving = list(self.pending_free.values())
        swapped_kvs = [s.swapped_kv for s in (*self.swapped, *leaving) if s.swapped_kv is not None]
        self.kv.check_integrity([*present, *leaving], swapped_kvs, self.steps_in_flight)
        for sequence in present:
            if not self.shape.is_indivisible(sequence.request):
                self._check_running(sequence)
            else:
                self._check_indivisible(sequence)
        assert all(s.phase is Phase.SWAPPED and s.swapped_kv is not None for s in self.swapped)
        self._check_slots(present)
        in_flight = Counter(part.sequence.id for plan in self.steps_in_flight for part in plan.scheduled)
        assert all(in_flight[s.id] == s.num_steps_in_flight for s in (*present, *leaving)), (
            "steps in flight do not add up"
        )
        assert self.running == sorted(self.running, key=lambda s: s.order)
        assert not any(self.shape.is_indivisible(s.request) for s in (*self.running, *self.swapped))

    def _check_slots(self, present: list[Sequence]) -> None:
        holders = {s.request.key if s.request.beam is not None else s: s.request for s in present}
        num_slots_of: Counter[str] = Counter()
        for request in holders.values():
            num_slots_of[request.tenant] += request.num_slots
        assert self.num_slots_of == num_slots_of, "slots of tenants do not add up"
        assert self.num_slots == sum(num_slots_of.values()), "slots do not add up"
        beams = [s for s in present if s.request.beam is not None]
        assert sorted(s.id for s in beams) == sorted(s.id for each in self.searches.values() for s in each)
        for each in self.searches.values():
            assert {s.id for s in each} == {s.id for s in each[0].siblings}, "a search lacks beams"

    def _check_running(self, sequence: Sequence) -> None:
        assert sequence.phase is (Phase.SWAPPING_IN if self.kv.is_swapping_in(sequence) else Phase.RUNNING)
        assert sequence.num_committed <= sequence.num_computed <= sequence.num_known
        assert len(sequence.block_ids) >= self.shape.num_blocks_for(sequence.num_computed + sequence.num_extra)
        parts = [part for plan in self.steps_in_flight for part in plan.scheduled if part.sequence is sequence]
        assert sequence.num_extra == sum(part.max_extra_tokens for part in parts), "extra tokens do not add up"

    def _check_indivisible(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.tokens)
        assert sequence.phase is Phase.RUNNING
        assert sequence.num_steps_in_flight <= 1, "a prompt is computed twice"
        parts = [part for plan in self.steps_in_flight for part in plan.scheduled if part.sequence is sequence]
        assert all(part.num_tokens == num_tokens for part in parts), "an indivisible prompt is divided"
        is_without_kv = self.shape.is_without_kv(sequence.request)
        assert len(sequence.block_ids) == (0 if is_without_kv else self.shape.num_blocks_for(num_tokens))
        assert sequence.num_computed == (0 if is_without_kv or not parts else num_tokens)
