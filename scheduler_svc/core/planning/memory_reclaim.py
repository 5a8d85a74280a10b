"""Frees blocks of a replica while the memory of its machine or container is short.

Each measurement of the worker leads to one change, since only the next one shows the effect of that. Admission and the
size of prompts' chunks follow the same state: see `capacity.py` and `running.py`.
"""

from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.step import MemoryPressure

_EVICTED_SHARE = 8  # of each tier's blocks, one in so many is evicted at a time while sequences wait


class MemoryReclaimer:
    """Frees blocks; the next step returns their memory to the system.

    It does nothing for blocks on a GPU: they are one allocation, which is returned as a whole.
    """

    def __init__(self, preemptor: Preemptor, waiting: WaitingSequences) -> None:
        self._preemptor = preemptor
        self._waiting = waiting

    def reclaim(self, replica: Replica) -> None:
        """Acts on the replica's last measurement, once.

        While memory is short, the memory of free blocks is returned; if sequences wait, some cached blocks are freed
        each time. When it is critical, all cached blocks are freed, and those of sequences that wait here; if there is
        none of these, the sequence that was admitted last is preempted, if another one runs.
        """
        if not replica.has_new_pressure:
            return
        replica.has_new_pressure = False
        if not replica.is_short_of_memory or not replica.shape.has_kv_in_host_memory:
            return
        if replica.memory_pressure is MemoryPressure.CRITICAL:
            if not self._drop_waiting(replica) and not self._free_cached(replica):
                self._preemptor.preempt_newest(replica)
            self._free_cached(replica)
        elif self._waiting or replica.swapped:
            for tier in (replica.kv.device, replica.kv.host):
                tier.free_cached(-(-tier.pool.num_blocks // _EVICTED_SHARE))
        # Without blocks to discard, a step would lead to the next measurement, and that to the next step.
        replica.must_discard = replica.kv.device.pool.has_free_memory or replica.kv.host.pool.has_free_memory

    def _drop_waiting(self, replica: Replica) -> bool:
        """Frees the blocks of sequences that wait on the replica, on both tiers: they are computed again later."""
        num_before = len(replica.swapped)
        for sequence in list(replica.swapped):
            if sequence in replica.swapped:  # a beam leaves with the others of its search
                self._preemptor.requeue(replica, sequence)
        return len(replica.swapped) < num_before

    def _free_cached(self, replica: Replica) -> bool:
        return sum([replica.kv.device.free_cached(), replica.kv.host.free_cached()]) > 0
