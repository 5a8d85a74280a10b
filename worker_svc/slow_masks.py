"""Masks that take long, made ahead of the steps that need them.

A step waits for the masks of its sequences. A grammar can be written so that each of them takes tens of milliseconds,
which all other sequences of the step would lose with each token. So a step has an amount of time for masks. When one
needed more, those of the next ones are measured one by one. A grammar of which one took long is slow from then on: its
sequences sample only once their next mask is made, on a thread of low priority. They delay themselves alone, and have
the same tokens. The first mask of a sequence that has output already is made there too: its worker may have ended with
many sequences that were slow.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from svc_common.grammars import grammar_threads
from worker_svc.metrics import count_masks

# For the masks of one step, beside its forward pass.
_STEP_SECONDS = 0.02
# A mask takes long from here on: 64 usual ones take less than that together.
_SLOW_SECONDS = 0.001
# Steps that are measured after one that took too long.
_MEASURED_STEPS = 1024
# After so many masks in a row that were quick a grammar is not slow any more. It was made for one of new lexers, whose
# first masks take longer. Each time it turns out to be wrong the number doubles.
_QUICK_MASKS = 64
_NICE = 10  # a tenth of a core where the forward passes need all of them

Mask = NDArray[np.int32]


def takes_long(seconds: float) -> bool:
    """Whether other sequences must not wait for what took so long."""
    return seconds > _SLOW_SECONDS


class MaskPace:
    """Whether a grammar's masks take long. All sequences of the grammar share it; calls may come from any thread."""

    def __init__(self) -> None:
        self.is_slow = False
        self._num_quick = 0  # in a row
        self._enough = _QUICK_MASKS // 2

    def note_slow(self) -> None:
        """One took long."""
        self._num_quick = 0
        if not self.is_slow:
            self.is_slow = True
            self._enough *= 2

    def note_quick(self) -> None:
        """One was quick."""
        self._num_quick += 1
        if self._num_quick >= self._enough:
            self.is_slow = False


class Masked(Protocol):
    """A sequence's matcher."""

    pace: MaskPace

    def fill(self, mask: Mask) -> bool:
        """Sets the bits of the tokens that may follow in a mask of zeros. False: a limit was reached."""


class MaskTimer:
    """Makes the masks of a step, and finds out which of them take long. For one thread."""

    def __init__(self) -> None:
        self._num_measured_left = 0

    def run(self, rows: Sequence[tuple[Masked, Mask]], fill_all: Callable[[], None]) -> None:
        """Fills the mask of each matcher; `fill_all` does it for all of them at once."""
        started = time.perf_counter()
        if self._num_measured_left:
            self._num_measured_left -= 1
            seconds = [_fill(matcher, mask)[1] for matcher, mask in rows]
            if sum(seconds) > _STEP_SECONDS:
                for (matcher, _), one in zip(rows, seconds, strict=True):
                    if takes_long(one):
                        matcher.pace.note_slow()
        else:
            fill_all()
        if time.perf_counter() - started > _STEP_SECONDS:
            self._num_measured_left = _MEASURED_STEPS


class SlowMasks:
    """The thread that makes masks ahead."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._thread = grammar_threads(1, "slow masks")
        self._thread.submit(_lower_priority)

    def start(self, matcher: Masked) -> "Future[Mask | None]":
        """Makes the mask of a matcher, which must not be used until then. None: a limit was reached."""
        return self._thread.submit(self._make, matcher)

    def _make(self, matcher: Masked) -> Mask | None:
        mask = np.zeros(self._num_words, np.int32)
        is_filled, seconds = _fill(matcher, mask)
        if takes_long(seconds):
            matcher.pace.note_slow()
        else:
            matcher.pace.note_quick()
        count_masks(1, seconds)
        return mask if is_filled else None


def _fill(matcher: Masked, mask: Mask) -> tuple[bool, float]:
    """Returns also the seconds of processor time: a busy machine makes no mask slow."""
    started = time.thread_time()
    is_filled = matcher.fill(mask)
    return is_filled, time.thread_time() - started


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
