"""Masks that take long, made ahead of the steps that need them.

A step waits for the masks of its sequences. A grammar can be written so that each of them takes tens of milliseconds,
which all other sequences of the step would lose with each token. So a step has an amount of time for masks. Where one
needed more, the grammars whose masks took longest are slow from then on: their sequences sample only once their next
mask is made, on a thread of low priority, on which all slow grammars have equal shares. They delay themselves alone,
and have the same tokens. The first mask of a sequence that has output already is made there too: its worker may have
ended with many sequences that were slow. The first one of a grammar is made when it is compiled.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from svc_common.grammars import grammar_threads
from worker_svc.metrics import count_masks

# For the masks of one step, beside its forward pass.
_STEP_SECONDS = 0.01
# A mask takes long from here on: 64 usual ones take less than that together.
_SLOW_SECONDS = 0.001
# Steps that are measured after one that took too long, where several threads make masks and so none is measured alone.
_MEASURED_STEPS = 1024
# After so many masks in a row that were quick a grammar is not slow any more. It was made for one of new lexers, whose
# first masks take longer. Each time it turns out to be wrong the number doubles.
_QUICK_MASKS = 64
_NICE = 19  # 1.5 % of a core where the forward passes need all of them, and what they leave

Mask = NDArray[np.int32]


def takes_long(seconds: float) -> bool:
    """Whether other sequences must not wait for what took so long, in each step."""
    return seconds > _SLOW_SECONDS


def takes_too_long(seconds: float) -> bool:
    """Whether other sequences must not even wait once for masks that took so long."""
    return seconds > _STEP_SECONDS


class MaskPace:
    """Whether a grammar's masks take long. All sequences of the grammar share it; calls may come from any thread."""

    def __init__(self) -> None:
        self.is_slow = False
        self.turn = 0.0  # of its masks that are made ahead
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

    @property
    def num_pending(self) -> int:
        """The tokens that `advance` would match."""

    def advance(self) -> object:
        """Matches the tokens that were added since the last mask."""

    def fill(self, mask: Mask) -> bool:
        """Sets the bits of the tokens that may follow in a mask of zeros. False: a limit was reached."""


class MaskTimer:
    """Makes the masks of a step, and finds out which of them take long. For one thread."""

    def __init__(self, *, always_measures: bool) -> None:
        """`always_measures`: masks are made one by one in any case."""
        self._always_measures = always_measures
        self._num_measured_left = 0

    def run(self, rows: Sequence[tuple[Masked, Mask]], fill_all: Callable[[], None]) -> None:
        """Fills the mask of each matcher; `fill_all` does it for all of them at once."""
        started = time.perf_counter()
        if self._always_measures or self._num_measured_left:
            self._num_measured_left = max(0, self._num_measured_left - 1)
            _note_slow([(_fill(matcher, mask)[1], matcher.pace) for matcher, mask in rows])
        else:
            fill_all()
        if takes_too_long(time.perf_counter() - started):
            self._num_measured_left = _MEASURED_STEPS


class SlowMasks:
    """The thread that makes masks ahead."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._lock = threading.Lock()
        self._waiting: list[tuple[weakref.ref[Masked], MaskPace, Future[Mask | None]]] = []
        self._turn = 0.0  # of the mask that was begun last
        self._thread = grammar_threads(1, "slow masks")
        self._thread.submit(_lower_priority)

    def start(self, matcher: Masked) -> "Future[Mask | None]":
        """Makes the mask of a matcher, which must not be used until then. None: a limit was reached.

        None is made for a matcher that nobody has any more when its turn comes: its sequence has ended. The grammar
        that had the least of the thread's time comes first; one that had none for a while has no more than the others
        from then on.
        """
        future = Future[Mask | None]()
        with self._lock:
            matcher.pace.turn = max(matcher.pace.turn, self._turn)
            self._waiting.append((weakref.ref(matcher), matcher.pace, future))
        self._thread.submit(self._make_next)
        return future

    def _make_next(self) -> None:
        found = self._next()
        if found is None:
            return
        matcher, future = found
        try:
            future.set_result(self._make(matcher))
        except BaseException as error:
            future.set_exception(error)

    def _next(self) -> tuple[Masked, Future[Mask | None]] | None:
        with self._lock:
            while self._waiting:
                place = min(range(len(self._waiting)), key=lambda place: self._waiting[place][1].turn)
                reference, pace, future = self._waiting.pop(place)
                matcher = reference()
                if matcher is not None:
                    self._turn = pace.turn
                    return matcher, future
        return None

    def _make(self, matcher: Masked) -> Mask | None:
        mask = np.zeros(self._num_words, np.int32)
        # Of a sequence that continues here these are all of its tokens, and in a step one.
        num_pending, started = matcher.num_pending, time.thread_time()
        matcher.advance()
        matching = time.thread_time() - started
        is_filled, seconds = _fill(matcher, mask)
        if takes_long(seconds + matching / max(1, num_pending)):
            matcher.pace.note_slow()
        else:
            matcher.pace.note_quick()
        with self._lock:
            matcher.pace.turn += seconds + matching
        count_masks(1, seconds + matching)
        return mask if is_filled else None


def _note_slow(masks: list[tuple[float, MaskPace]]) -> None:
    """The grammars whose masks took longest are slow, so many of them that the others take no longer than a step may
    wait.
    """
    total, of_grammars, with_long = 0.0, dict[MaskPace, float](), set[MaskPace]()
    for seconds, pace in masks:
        total += seconds
        of_grammars[pace] = of_grammars.get(pace, 0.0) + seconds
        if takes_long(seconds):
            with_long.add(pace)
    for pace in sorted(with_long, key=of_grammars.__getitem__, reverse=True):
        if not takes_too_long(total):
            return
        pace.note_slow()
        total -= of_grammars[pace]


def _fill(matcher: Masked, mask: Mask) -> tuple[bool, float]:
    """Returns also the seconds of processor time: a busy machine makes no mask slow."""
    started = time.thread_time()
    is_filled = matcher.fill(mask)
    return is_filled, time.thread_time() - started


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
