"""Chooses what copies blocks, by the device of the cache."""

from torch import Tensor

from worker_svc.block_copier import BlockCopier, HostBlockCopier, RateLimiter
from worker_svc.cache import KVCache
from worker_svc.executor import Executor


def make_block_copier(
    executor: Executor, cache: KVCache, host_blocks: Tensor, rate_limiter: RateLimiter
) -> BlockCopier:
    """The copier of the cache that an executor computes over.

    `host_blocks` are uint8 [num_host_blocks, block_bytes]; they are pinned if the cache is on a GPU.
    """
    if cache.device.type != "cuda":
        return HostBlockCopier(cache.blocks, host_blocks, executor.submit, rate_limiter)
    # Imported here because it imports Triton, which a CPU does not need.
    from worker_svc.gpu.block_copier import CudaCopyStream, StreamBlockCopier

    return StreamBlockCopier(cache.blocks, host_blocks, CudaCopyStream(cache.device), rate_limiter)
