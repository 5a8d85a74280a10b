"""Work that begins while its loop is closed ends, or is refused. An interrupt leaves nothing behind."""

import _thread
import asyncio
import threading
from concurrent.futures import Future

import pytest

from quire_offline.loop_thread import LoopThread


async def for_ever() -> None:
    await asyncio.sleep(3_600)


def test_all_work_that_began_before_the_end_is_cancelled_by_it() -> None:
    """Several threads begin work without a pause, while another one closes the loop."""
    for _ in range(5):
        thread = LoopThread("test")
        begun: list[Future[None]] = []

        def begin(thread: LoopThread = thread, begun: list[Future[None]] = begun) -> None:
            for _ in range(100):
                try:
                    begun.append(thread.start(for_ever())[0])
                except RuntimeError:
                    return

        threads = [threading.Thread(target=begin) for _ in range(3)]
        for one in threads:
            one.start()
        while not begun:
            pass
        thread.close()
        for one in threads:
            one.join()
        for future in begun:
            with pytest.raises(asyncio.CancelledError):
                future.result(200)


def test_a_loop_that_is_closed_takes_no_work() -> None:
    thread = LoopThread("test")
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(for_ever())


def test_work_that_has_ended_can_be_cancelled_after_the_end_of_the_loop() -> None:
    thread = LoopThread("test")
    future, cancel = thread.start(asyncio.sleep(0))
    assert future.result(200) is None
    thread.close()
    cancel()


def test_a_result_that_an_interrupt_has_lost_is_undone() -> None:
    thread = LoopThread("test")
    undone: list[int] = []

    async def work() -> int:
        _thread.interrupt_main()  # which waits for the result, and is interrupted when it is there
        return 5

    async def undo(result: int) -> None:
        undone.append(result)

    with pytest.raises(KeyboardInterrupt):
        thread.run(work(), undo)
    thread.close()
    assert undone == [5]


def test_a_thread_whose_start_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        begun.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LoopThread("test")
    (thread,) = begun
    thread.join(200)
    assert not thread.is_alive()
