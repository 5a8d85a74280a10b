"""What replicas can take, and how fast they are."""

from collections.abc import Iterable

from scheduler_svc.core.admission import Rates
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.planning.new_request_reserve import NewRequestReserve
from scheduler_svc.core.policy.placement import Placement, num_owed_blocks
from scheduler_svc.core.policy.preemption import PreemptionPolicy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence

_RATES_SECONDS = 1.0  # for which rates hold


class Capacity:
    """Room on replicas, and the rates of all of them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        placement: Placement,
        preemption: PreemptionPolicy,
        for_new_requests: NewRequestReserve,
    ) -> None:
        self._limits = limits
        self._placement = placement
        self._preemption = preemption
        self.for_new_requests = for_new_requests
        self._rates = Rates(0.0, 0.0, 0.0)
        self._rates_until = 0.0

    # Room.

    def max_sequences(self, replica: Replica) -> int:
        """How many sequences a step of a replica may hold."""
        return min(self._limits.max_sequences, replica.shape.max_sequences)

    def is_held(self, replica: Replica) -> bool:
        """Whether a replica admits nothing for now: its memory is short, and something runs."""
        return replica.is_short_of_memory and replica.num_running > 0

    def has_free_slot(self, replica: Replica) -> bool:
        """Whether a replica has a free sequence slot: it has as many slots as a step may hold sequences."""
        return replica.num_slots < self.max_sequences(replica) and not self.is_held(replica)

    def num_missing_slots(self, replica: Replica, sequence: Sequence) -> int:
        """Slots that a waiting sequence, or its search, lacks on a replica; 0 or less if it lacks none."""
        most = replica.num_slots if self.is_held(replica) else self.max_sequences(replica)
        return replica.num_slots + sequence.request.num_slots - most

    def num_needed_to_resume(self, replica: Replica, sequence: Sequence) -> int:
        """Device blocks that must be available to swap a sequence in, or all beams of its search."""
        num_needed = sum(replica.kv.num_needed_to_swap_in(each) for each in sequence.unit)
        return num_needed + sequence.num_fork_blocks(replica.shape.block_size)

    def has_room(self, replica: Replica, sequence: Sequence, num_needed: int) -> bool:
        """Whether a sequence that needs `num_needed` blocks leaves enough to others."""
        if replica.shape.is_without_kv(sequence.request):
            return True
        return num_needed + self.reserve(replica, sequence) <= replica.kv.num_available

    def reserve(self, replica: Replica, sequence: Sequence) -> int:
        """Blocks that a sequence must leave: to those that run, for known tokens and the next few tokens, and to
        tenants with fewer slots.

        A new request leaves none to prompts that are limited for it: for these, sequences are preempted if need be.
        """
        if not replica.running:
            return 0
        low = self._preemption.low_watermark(replica, len(replica.running) + 1)
        num_blocks = max(low, replica.shape.num_blocks // 100) + self._placement.load(replica).num_blocks
        if limit := self.for_new_requests.limit_for(replica, sequence):
            num_blocks -= sum(num_owed_blocks(replica, each) for each in replica.running if limit.applies_to(each))
        return num_blocks + self.for_new_requests.left_by(replica, sequence)

    def measured_reserve(self, replica: Replica, sequence: Sequence) -> int:
        """The same, of the load as it is now."""
        self._placement.measure(replica)
        return self.reserve(replica, sequence)

    def wants_backups(self, replica: Replica) -> bool:
        """Whether blocks that will soon be evicted should be copied to the host."""
        if not self._preemption.may_swap(replica) or not replica.kv.is_short_of_free_blocks:
            return False
        return replica.costs.swap_seconds(1, 1) < replica.costs.recompute_seconds(replica.shape.block_size)

    # Rates.

    def forget_rates(self) -> None:
        """Replicas came or went."""
        self._rates_until = 0.0

    def rates(self, replicas: Iterable[Replica], now: float) -> Rates:
        """What these replicas do together, as measured within the last second."""
        if now >= self._rates_until:
            working = [replica for replica in replicas if replica.admits]
            costs = [replica.costs for replica in working]
            self._rates = Rates(
                tokens_per_second=sum(self._tokens_per_second(replica) for replica in working),
                prefill_seconds_per_token=min((cost.recompute_seconds(1) for cost in costs), default=0.0),
                decode_seconds_per_token=min((cost.step_seconds(0, 1) for cost in costs), default=0.0),
            )
            # What is not known yet may be a moment later.
            self._rates_until = now + (_RATES_SECONDS if self._rates.tokens_per_second else 0.0)
        return self._rates

    def _tokens_per_second(self, replica: Replica) -> float:
        """What a replica computes when it is busy; 0 before the first measurement.

        After an idle time the measurement is low. Then the replica is assumed to decode as many sequences as it has
        slots, or as fit into its blocks if they are like those that run.
        """
        measured = replica.costs.tokens_per_second
        if not measured:
            return 0.0
        num_held = sum(len(s.block_ids) for s in replica.running)
        most = self.max_sequences(replica)
        fitting = replica.shape.num_blocks * len(replica.running) // num_held if num_held else most
        width = max(1, min(most, fitting))
        return max(measured, width / replica.costs.step_seconds(0, width))
