"""What a worker's memory holds: weights, blocks, activations, and what allocators keep without using it."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from worker_svc.host_memory import HostMemoryReader

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes that are in memory now.

    On a GPU all but `swap` are of the device. `fragmentation` is what the allocator keeps and nothing uses: torch's on
    a GPU, the C library's on a CPU.
    """

    weights: int
    kv: int
    swap: int
    activations: int
    """All else that the process uses more than before it began to load the model; on a GPU, also what captured graphs
    use while they run.
    """
    fragmentation: int
    device_used: int = 0
    """Of the GPU, by all processes."""
    device_limit: int = 0
    """Of the GPU; 0 on a CPU."""

    def describe(self) -> dict[str, object]:
        """The parts by name, and the device if it is not the host."""
        parts = {f"{name}_bytes": number for name, number in asdict(self).items() if not name.startswith("device_")}
        if not self.device_limit:
            return dict(parts)
        return {**parts, "device": {"used_bytes": self.device_used, "limit_bytes": self.device_limit}}


def allocated_bytes(device: torch.device) -> int:
    """Bytes that this process uses where the model is, without what an allocator only keeps."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return HostMemoryReader().read_process() - _unused_heap_bytes()


class MemoryAccount:
    """Measures the parts of one model's memory. Any thread may use it."""

    def __init__(self, device: torch.device) -> None:
        """Before the model is loaded."""
        self._device = device
        self._before = allocated_bytes(device)
        self._weights = self._graphs = 0
        self._blocks: tuple[Tensor, Tensor] | None = None

    def note_weights(self) -> None:
        """The model is loaded, and nothing else yet."""
        self._weights = max(0, allocated_bytes(self._device) - self._before)

    def note_blocks(self, blocks: Tensor, host_blocks: Tensor) -> None:
        """The blocks of both tiers."""
        self._blocks = (blocks, host_blocks)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """While the model's graphs are captured on a GPU. What torch's allocator keeps unused afterwards, more than
        before, is theirs: it counts as allocated during a capture only, and is not given back while the graphs exist.
        """
        torch.cuda.empty_cache()
        before = _unused_gpu_bytes(self._device)
        yield
        torch.cuda.empty_cache()
        self._graphs = max(0, _unused_gpu_bytes(self._device) - before)

    def close(self) -> None:
        """Refers to no block any more."""
        self._blocks = None

    def read(self) -> MemoryParts:
        """Measures; some milliseconds for GiB of blocks on a CPU."""
        blocks = self._blocks
        if self._device.type == "cuda":
            kv, swap = (0, 0) if blocks is None else (blocks[0].nbytes, blocks[1].nbytes)
            free, total = torch.cuda.mem_get_info(self._device)
            allocated = torch.cuda.memory_allocated(self._device)
            unused = max(0, _unused_gpu_bytes(self._device) - self._graphs)
            activations = max(0, allocated - self._before - self._weights - kv) + self._graphs
            return MemoryParts(self._weights, kv, swap, activations, unused, total - free, total)
        kv, swap = (0, 0) if blocks is None else (_resident_bytes(blocks[0]), _resident_bytes(blocks[1]))
        unused = _unused_heap_bytes()  # asked once: the C library walks its heap, some milliseconds
        allocated = HostMemoryReader().read_process() - unused
        activations = max(0, allocated - self._before - self._weights - kv - swap)
        return MemoryParts(self._weights, kv, swap, activations, unused)


def _unused_gpu_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _resident_bytes(memory: Tensor) -> int:
    """Bytes of a mapping's pages that are in memory."""
    if sys.platform != "linux" or not memory.nbytes:
        return memory.nbytes
    first = memory.data_ptr() // _PAGE * _PAGE
    num_pages = -(-(memory.data_ptr() + memory.nbytes - first) // _PAGE)
    states = (ctypes.c_ubyte * num_pages)()
    failed = _c_library().mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * _PAGE), states)
    return memory.nbytes if failed else (num_pages - bytes(states).count(0)) * _PAGE


_HEAP_NUMBERS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _HEAP_NUMBERS)


def _unused_heap_bytes() -> int:
    """Bytes that the C library keeps and nothing uses; 0 where it does not report them."""
    try:
        info = _c_library().mallinfo2
    except AttributeError:
        return 0
    info.restype = _HeapInfo
    return int(info().fordblks)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
