"""What gives way when blocks run out: who, and whether its blocks are swapped or its tokens computed again."""

import math
from collections.abc import Callable
from enum import Enum

from scheduler_svc.core.explain import Preemption, Return
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Sequence

MIN_STEPS = 16  # a sequence that came in, or back, runs so many steps before it gives way, if another one can
_LOW_STEPS = 4  # steps of decodes for which blocks are kept available, by swapping ahead of need


class PreemptionMode(Enum):
    """How sequences that gave way are brought back."""

    AUTO = "auto"  # whichever costs less
    SWAP = "swap"  # where the host has room
    RECOMPUTE = "recompute"


class Pressure:
    """Finds room for running sequences on a replica. `give_way` takes one off it."""

    def __init__(self, policy: Policy, mode: PreemptionMode) -> None:
        self._policy = policy
        self._mode = mode

    def weigh(self, replica: Replica, sequence: Sequence) -> Preemption:
        """What swapping a running sequence would cost, and what computing it again would, in seconds."""
        num_tail = len(replica.tail_of(sequence))
        kept = (len(sequence.block_ids) - num_tail) * replica.shape.block_size
        swap = replica.costs.swap_seconds(num_tail, num_tail) if replica.shape.num_host_blocks else math.inf
        recompute = replica.costs.recompute_seconds(max(0, sequence.num_computed - kept))
        match self._mode:
            case PreemptionMode.AUTO:
                choice = Return.SWAP if swap <= recompute else Return.RECOMPUTE
            case PreemptionMode.SWAP:
                choice = Return.SWAP if replica.shape.num_host_blocks else Return.RECOMPUTE
            case PreemptionMode.RECOMPUTE:
                choice = Return.RECOMPUTE
        return Preemption(choice, swap, recompute)

    def victim(self, replica: Replica, spared: set[int]) -> Sequence | None:
        """Who gives way first: by class, then by what its tenant owes, then who is cheapest to bring back."""
        candidates = [s for s in replica.running if s.phase is Phase.RUNNING and s.id not in spared]
        settled = [s for s in candidates if s.num_steps >= MIN_STEPS]
        return max(settled or candidates, key=self._gives_way(replica), default=None)

    def _gives_way(self, replica: Replica) -> Callable[[Sequence], tuple[object, ...]]:
        def key(sequence: Sequence) -> tuple[object, ...]:
            return (*self._policy.gives_way(sequence), -sequence.num_computed)

        return key

    def is_worth_beginning(self, replica: Replica) -> bool:
        """Whether who gives way first would be swapped, and so had better leave before blocks run out."""
        victim = self.victim(replica, set())
        if victim is None or len(replica.running) == 1 or victim.num_steps < MIN_STEPS:
            return False
        return self.weigh(replica, victim).choice is Return.SWAP

    def low_watermark(self, replica: Replica, num_decodes: int) -> int:
        """Blocks that should be available beyond those of this step, for the decodes of the next few."""
        return math.ceil(num_decodes * _LOW_STEPS / replica.shape.block_size)
