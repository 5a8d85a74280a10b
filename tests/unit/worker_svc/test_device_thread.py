"""Steps are launched one ahead and answered in order; other work has the device to itself."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from worker_svc.device_thread import DeviceThread, Timed

LONG = 30.0


class Step:
    """A step that records its launch, and is done when released."""

    def __init__(self, name: str = "", done: bool = False) -> None:
        self.name = name
        self.launched, self.finished = threading.Event(), threading.Event()
        self.device_waits = threading.Event()
        self._done = threading.Event()
        if done:
            self.let_go()

    def let_go(self) -> None:
        self._done.set()

    def launch(self) -> "Step":
        self.launched.set()
        return self

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        if threading.current_thread().name == "device":
            self.device_waits.set()
        assert self._done.wait(LONG)

    def finish(self, launched: "Step") -> str:
        assert launched is self
        self.wait()
        self.finished.set()
        return self.name


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    device = DeviceThread()
    yield device
    device.close()


@pytest.fixture
def submit(device: DeviceThread) -> Callable[[Step], "Future[Timed[str]]"]:
    return lambda step: device.submit_step(step.launch, step.finish)


Submit = Callable[[Step], "Future[Timed[str]]"]


def test_a_step_is_launched_while_the_one_before_it_runs(submit: Submit) -> None:
    steps = [Step("a"), Step("b"), Step("c")]
    answers = [submit(step) for step in steps]
    assert steps[1].launched.wait(LONG)
    assert not answers[0].done()
    assert not steps[2].launched.is_set()
    steps[0].let_go()
    assert answers[0].result(LONG).value == "a"
    assert steps[2].launched.wait(LONG)
    steps[1].let_go()
    steps[2].let_go()
    assert answers[2].result(LONG).value == "c"


def test_the_thread_waits_for_the_device_itself_if_no_more_work_may_start(submit: Submit) -> None:
    first, second = Step("a"), Step("b")
    answers = [submit(first)]
    assert first.launched.wait(LONG)
    assert not first.device_waits.is_set()
    answers.append(submit(second))
    assert first.device_waits.wait(LONG)
    assert not second.device_waits.is_set()
    first.let_go()
    assert answers[0].result(LONG).value == "a"
    second.let_go()
    assert answers[1].result(LONG).value == "b"


def test_steps_are_answered_in_order_whichever_is_done_first(submit: Submit) -> None:
    first, second = Step("a"), Step("b", done=True)
    answers = [submit(first), submit(second)]
    assert second.launched.wait(LONG)
    assert not second.finished.is_set()
    first.let_go()
    assert [answer.result(LONG).value for answer in answers] == ["a", "b"]


def test_what_is_done_when_it_is_launched_is_answered_before_the_next_is_launched(device: DeviceThread) -> None:
    first, second = Step(done=True), Step(done=True)
    seen = []

    def launch() -> Step:
        seen.append(first.finished.is_set())
        return second

    queue_both = threading.Event()
    device.submit(lambda: queue_both.wait(LONG))
    device.submit_step(first.launch, first.finish)
    answer = device.submit_step(launch, second.finish)
    queue_both.set()
    answer.result(LONG)
    assert seen == [True]


def test_other_work_waits_for_all_steps_and_has_the_device_to_itself(device: DeviceThread, submit: Submit) -> None:
    step, later = Step(), Step(done=True)
    submit(step)
    work = device.submit(lambda: (step.finished.is_set(), later.launched.is_set()))
    submit(later)
    assert step.launched.wait(LONG)
    step.let_go()
    assert work.result(LONG).value == (True, False)


@pytest.mark.parametrize("half", ["launch", "finish"])
def test_what_a_step_raises_is_its_own_answer_in_its_turn(half: str, device: DeviceThread, submit: Submit) -> None:
    def broken(*_: object) -> Step:
        raise ValueError("broken")

    first, failing, last = Step("a"), Step(done=True), Step("c", done=True)
    answer = submit(first)
    failed = device.submit_step(
        broken if half == "launch" else failing.launch, broken if half == "finish" else failing.finish
    )
    after = submit(last)
    assert first.launched.wait(LONG)
    assert not failed.done()
    first.let_go()
    assert answer.result(LONG).value == "a"
    with pytest.raises(ValueError, match="broken"):
        failed.result(LONG)
    assert after.result(LONG).value == "c"


def test_what_is_cancelled_before_it_is_launched_never_is(submit: Submit) -> None:
    steps = [Step(), Step(), Step(), Step("d", done=True)]
    answers = [submit(step) for step in steps]
    assert steps[1].launched.wait(LONG)
    assert answers[2].cancel()
    assert not answers[1].cancel()
    steps[0].let_go()
    steps[1].let_go()
    assert answers[3].result(LONG).value == "d"
    assert not steps[2].launched.is_set()


def _submit_until_refused(device: DeviceThread) -> None:
    while True:
        device.submit(lambda: None)


def test_closing_finishes_what_was_launched_and_drops_the_rest() -> None:
    device = DeviceThread()
    steps = [Step("a"), Step("b"), Step("c")]
    answers = [device.submit_step(step.launch, step.finish) for step in steps]
    assert steps[1].launched.wait(LONG)
    closing = threading.Thread(target=device.close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        _submit_until_refused(device)
    steps[0].let_go()
    steps[1].let_go()
    closing.join(LONG)
    assert [answer.result(0).value for answer in answers[:2]] == ["a", "b"]
    assert answers[2].cancelled()
    assert not steps[2].launched.is_set()


def test_idle_time_and_busy_time_are_separate(device: DeviceThread) -> None:
    pause = threading.Event()
    device.submit(lambda: None).result(LONG)
    pause.wait(0.05)
    timed = device.submit(lambda: pause.wait(0.02)).result(LONG)
    assert timed.idle_seconds >= 0.05
    assert timed.busy_seconds >= 0.02


def test_the_device_is_not_idle_before_a_step_that_was_launched_ahead(submit: Submit) -> None:
    pause = threading.Event()
    first, second = Step(), Step()
    answers = [submit(first), submit(second)]
    assert second.launched.wait(LONG)
    pause.wait(0.05)
    first.let_go()
    assert answers[0].result(LONG).busy_seconds >= 0.05
    pause.wait(0.05)
    second.let_go()
    timed = answers[1].result(LONG)
    assert timed.idle_seconds == 0.0
    # From the end of the first, not from when it was launched
    assert timed.busy_seconds >= 0.05
