"""Plans the sequences that run on a replica: decodes first, then chunks of prompts."""

from collections.abc import Callable

from scheduler_svc.core.beam_search import BeamGroup
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.planning.forks import Forks
from scheduler_svc.core.planning.new_request_reserve import NewRequestReserve
from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.planning.prompt_turns import PromptTurns
from scheduler_svc.core.planning.step_builder import StepBuilder, is_long
from scheduler_svc.core.policy.preemption import PreemptionPolicy
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import FIRST_TOKEN_FACTOR, Phase, Sequence

_LIMITED_PROMPTS = 0.05  # how much longer than a step of decodes one with limited prompts may take


class RunningPlanner:
    """Adds running sequences to steps, and preempts some of them when blocks run out."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: PreemptionPolicy,
        preemptor: Preemptor,
        turns: PromptTurns,
        forks: Forks,
        for_new_requests: NewRequestReserve,
        waiting: WaitingSequences,
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._preemptor = preemptor
        self._turns = turns
        self._forks = forks
        self._for_new_requests = for_new_requests
        self._waiting = waiting

    def add_decodes(self, step: StepBuilder) -> None:
        """Adds the sequences with one token to compute; if they exceed the budget, they take turns.

        Long prompts get no more of the step's time than makes it about `gap_factor` times as long as its decodes,
        unless their first tokens would be late. While new requests of a tenant with few slots come, prompts of tenants
        with many more make steps little longer than if all these sequences decoded. While memory is short, prompts get
        half of the tokens.
        """
        replica = step.replica
        decodes, step.is_closed = self._pick_decodes(replica)
        if len(decodes) > step.budget:
            decodes.sort(key=lambda sequence: sequence.num_steps)
            del decodes[step.budget :]
        for sequence in decodes:
            # Of several sequences of an account, a step computes as many as it can pay for.
            if sequence.has_budget and step.can_send(sequence):
                step.add(sequence, 1)
        decode_seconds = replica.costs.step_seconds(0, len(decodes)) if decodes else 0.0
        if replica.shape.has_usual_steps:
            num_prompts = self._waiting.num_for(replica) + sum(sequence.is_prefill for sequence in replica.running)
            step.limit_prompts(decode_seconds, many_decode=bool(decodes) and len(decodes) >= num_prompts)
        share = self._share_due_to_long_prompts(replica) if decodes else 1.0
        if share < 1.0:
            step.limit_long_prompts(max(self._limits.gap_factor - 1, share / (1 - share)) * decode_seconds)
        if limit := self._for_new_requests.prompt_limit(replica):
            num_prompts = sum(sequence.is_prefill and limit.applies_to(sequence) for sequence in replica.running)
            seconds = (1 + _LIMITED_PROMPTS) * replica.costs.step_seconds(0, len(decodes) + num_prompts)
            step.limit_some_prompts(limit, seconds - replica.costs.step_seconds(0, len(decodes)))
        if replica.is_short_of_memory:
            step.halve_rest()

    def add_prompt_chunks(
        self,
        step: StepBuilder,
        head: Sequence | None = None,
        admit_before: Callable[[Sequence], None] = lambda running: None,
    ) -> None:
        """Adds the sequences with several tokens to compute, as far as the budget and the blocks go.

        Classes go in order, within a class tenants take turns, and of a tenant's prompts the one whose first token is
        due first goes first. A `head` of the queue that can be admitted now has a turn like those that run: half of the
        budget is left to it. `admit_before` admits what is computed before a prompt that runs.
        """
        if step.is_closed:
            return
        kv = step.replica.kv
        prompts = [s for s in step.replica.running if s.is_prefill and s.is_plannable]
        num_left = self._turns.num_left_to(head, prompts, step.budget) if head is not None else 0
        for sequence in self._turns.order(step.replica, prompts):
            if step.budget:
                admit_before(sequence)
            if head is not None and head.phase not in (Phase.QUEUED, Phase.SWAPPED):
                num_left = 0  # it was admitted
            if step.budget <= num_left:
                break
            if not (sequence.has_budget and step.can_send(sequence)):
                continue
            num_tokens = step.num_prefill_tokens(sequence, step.budget - num_left)
            if num_tokens == 0:
                continue
            num_missing = kv.num_missing_blocks(sequence, num_tokens)
            if num_missing > kv.num_available:
                step.is_closed = True  # those after it take no block before it has its own
                scheduled_ids = {part.sequence.id for part in step.scheduled}
                self._preemptor.make_room(step.replica, sequence, num_missing, scheduled_ids)
                break
            step.add(sequence, num_tokens)
            self._turns.charge(step.replica, sequence, num_tokens)

    def _share_due_to_long_prompts(self, replica: Replica) -> float:
        """The share of a replica's time with which the first tokens of all new long prompts come when they are due;
        1 if one is late. Time in the queue does not count: the tenant's own load may be the reason.
        """
        share, seconds, costs = 0.0, 0.0, replica.costs
        for sequence in replica.running:
            if sequence.is_prefill and not sequence.num_output and is_long(sequence):
                num_cached = sequence.num_cached_tokens
                alone = costs.recompute_seconds(len(sequence.tokens) - num_cached, num_cached)
                due = sequence.request.arrived_at + sequence.waited + FIRST_TOKEN_FACTOR * alone
                left = due - self._waiting.now
                seconds += costs.recompute_seconds(sequence.num_uncomputed, sequence.num_computed)
                share = max(share, seconds / left if seconds < left else 1.0)
        return share

    def _pick_decodes(self, replica: Replica) -> tuple[list[Sequence], bool]:
        """The sequences that decode in this step, and whether blocks are short. Preempts sequences for their blocks.

        The beams of searches that go on are forked here, once there are blocks for all beams of the search. A sequence
        that would be swapped is preempted while some blocks are still free, so that no decode waits for the copy.
        """
        kv, size = replica.kv, replica.shape.block_size
        decodes = [s for s in replica.running if s.is_decode and s.is_plannable]
        need = sum(_needs_block(sequence, size) for sequence in decodes)
        searches = self._forks.due(replica) if replica.searches else []
        need += sum(search.num_new_blocks(size) for search in searches)
        low = self._policy.low_watermark(replica, len(decodes))
        if num_kept := self._for_new_requests.left_by_all(replica):
            low += num_kept + replica.shape.num_blocks // 100
        if need + low <= kv.num_available:
            return [*decodes, *self._fork(replica, searches)], False
        has_begun = False
        while (spare := kv.num_available + replica.num_pending_free - need) < low:
            if spare >= 0 and (has_begun or not self._policy.should_swap_early(replica)):
                break
            has_begun = True
            if not self._preemptor.preempt_victim(replica, protected_ids=set()):
                break
            decodes = [s for s in decodes if s.phase is Phase.RUNNING]
            need = sum(_needs_block(sequence, size) for sequence in decodes)
            searches = [search for search in searches if search.is_due]
            need += sum(search.num_new_blocks(size) for search in searches)
        if need <= kv.num_available:
            return [*decodes, *self._fork(replica, searches)], False
        # Enough blocks will be free soon. Sequences that need one now wait.
        room = kv.num_available
        able = []
        for sequence in decodes:
            needs_block = _needs_block(sequence, size)
            if not needs_block or room:
                room -= needs_block
                able.append(sequence)
        for search in searches:
            num_blocks = search.num_new_blocks(size)
            if num_blocks <= room:
                room -= num_blocks
                able += self._fork(replica, [search])
        return able, True

    def _fork(self, replica: Replica, searches: list[BeamGroup]) -> list[Sequence]:
        return [beam for search in searches for beam in self._forks.make(replica, search)]


def _needs_block(sequence: Sequence, block_size: int) -> bool:
    """Whether the next token of a sequence does not fit into its blocks."""
    return len(sequence.block_ids) * block_size <= sequence.num_computed + sequence.num_extra
