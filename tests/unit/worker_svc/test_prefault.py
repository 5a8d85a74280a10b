"""The memory of a cache is taken before it is written, as far as the machine has it to spare."""

import ctypes
import mmap
import os
import re

import pytest
import torch

from quire_kernels.cpu.large_pages import zeros_in_large_pages
from worker_svc.prefault import prefault

GIB = 2**30
SIZE = 100 * 2**20  # more than is taken at once, and no multiple of it

pytestmark = pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14), reason="needs Linux 5.14"
)


def resident(memory: torch.Tensor) -> int:
    """Bytes of a tensor that the system has given."""
    pages = bytearray(-(-memory.nbytes // mmap.PAGESIZE))
    vector = (ctypes.c_char * len(pages)).from_buffer(pages)
    arguments = (ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), vector)
    assert ctypes.CDLL(None).mincore(*arguments) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_all_is_taken_and_what_was_written_stays() -> None:
    memory = zeros_in_large_pages(SIZE)
    memory[12345] = 7
    assert resident(memory) < SIZE
    prefault(memory).join()
    assert resident(memory) >= SIZE
    assert memory[12345] == 7
    assert int(memory.sum()) == 7


def test_a_machine_that_runs_short_is_left_what_it_has() -> None:
    memory = zeros_in_large_pages(SIZE)
    left = iter([GIB, GIB - 1])
    prefault(memory, lambda: next(left)).join()
    assert 0 < resident(memory) < SIZE
