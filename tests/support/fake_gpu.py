"""The memory of a GPU that is not there, as torch reports it."""

import pytest
import torch

MIB = 1 << 20


class FakeGpu:
    """A GPU of 1,000 MiB, in place of `torch.cuda` until the end of a test.

    `allocated` bytes are in tensors, `kept` ones are the allocator's without a use, `graphs` are of captured graphs,
    which count as allocated during a capture only, and `elsewhere` are of the driver and of other processes.
    """

    total = 1000 * MIB

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.kept = self.graphs = self.elsewhere = self._peak = 0
        for name in (
            *("memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"),
            *("mem_get_info", "empty_cache", "synchronize"),
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def run(self, num_bytes: int) -> None:
        """Tensors of so many bytes come and go."""
        self.kept = max(self.kept, num_bytes)
        self._peak = max(self._peak, self.memory_reserved())

    def memory_allocated(self, device: object = None) -> int:
        return self.allocated

    def memory_reserved(self, device: object = None) -> int:
        return self.allocated + self.kept + self.graphs

    def max_memory_reserved(self, device: object = None) -> int:
        return max(self._peak, self.memory_reserved())

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._peak = self.memory_reserved()

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return self.total - self.elsewhere - self.memory_reserved(), self.total

    def empty_cache(self) -> None:
        self.kept = 0

    def synchronize(self, device: object = None) -> None:
        pass
