"""The reset of a replica's prefix cache, at an operator's request."""

from dataclasses import dataclass

from scheduler_svc.core.kv.manager import KVManager


@dataclass(frozen=True, slots=True)
class CacheReset:
    """How many cached blocks a reset has freed, and how many are still in the prefix index, on device and host."""

    num_freed_device: int
    num_freed_host: int
    num_kept_device: int
    num_kept_host: int


def reset_prefix_cache(kv: KVManager) -> CacheReset:
    """Frees the cached blocks of both tiers. Blocks of sequences, of steps in flight and of swaps are kept: they can
    still be shared, and are cached again when they lose their last owner.
    """
    return CacheReset(
        num_freed_device=kv.device.free_cached(),
        num_freed_host=kv.host.free_cached(),
        num_kept_device=len(kv.device.index),
        num_kept_host=len(kv.host.index),
    )
