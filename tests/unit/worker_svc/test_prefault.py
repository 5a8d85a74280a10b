"""Cache memory is page-faulted before it is written, as long as the machine has enough."""

import ctypes
import mmap
import os
import re
import threading
import weakref

import pytest
import torch

from quire_kernels.cpu.large_pages import zeros_in_large_pages
from worker_svc.prefault import Prefault

GIB = 2**30
SIZE = 100 * 2**20  # more than is taken at once, and no multiple of it

pytestmark = pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14), reason="needs Linux 5.14"
)


def resident(memory: torch.Tensor) -> int:
    """Resident bytes of a tensor."""
    pages = bytearray(-(-memory.nbytes // mmap.PAGESIZE))
    vector = (ctypes.c_char * len(pages)).from_buffer(pages)
    arguments = (ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), vector)
    assert ctypes.CDLL(None).mincore(*arguments) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_all_is_taken_and_what_was_written_stays() -> None:
    memory = zeros_in_large_pages(SIZE)
    memory[12345] = 7
    assert resident(memory) < SIZE
    Prefault(memory, 2).wait_for(SIZE)
    assert resident(memory) >= SIZE
    assert int(memory.sum()) == memory[12345] == 7


def test_a_machine_that_runs_short_is_left_what_it_has() -> None:
    memory = zeros_in_large_pages(SIZE)
    left = iter([GIB, GIB - 1])
    Prefault(memory, 2, lambda: next(left)).wait_for(SIZE)
    assert 0 < resident(memory) < SIZE


def test_a_busy_worker_is_left_alone() -> None:
    memory = zeros_in_large_pages(SIZE)
    may_begin, was_asked, is_idle = threading.Event(), threading.Semaphore(0), threading.Event()

    def available() -> int:
        may_begin.wait()
        return GIB

    def ask() -> bool:
        was_asked.release()
        return is_idle.is_set()

    prefault = Prefault(memory, 2, available)
    prefault.continue_while(ask)
    may_begin.set()
    for _ in range(6):
        was_asked.acquire()
    assert resident(memory) < SIZE
    is_idle.set()
    prefault.wait_for(SIZE)
    assert resident(memory) >= SIZE


def test_what_is_stopped_refers_to_the_memory_no_more() -> None:
    memory = zeros_in_large_pages(SIZE)
    prefault = Prefault(memory, 2, lambda: GIB)
    prefault.continue_while(lambda: False)
    prefault.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefault"]
    taken = weakref.ref(memory)
    del memory
    assert taken() is None
