"""Interrupts and the end of a model: what runs is cancelled, and no thread is left."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_models import save_bert
from offline_model import SMALL
from quire_offline import LLM, QuireError, SamplingParams
from worker_svc.encoder.instance import EncoderInstance
from worker_svc.instance import ModelInstance

ROOT = Path(__file__).parents[3]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
OURS = ("quire-offline", "device", "device-waiter", "host", "grammars", "masks", "tokenize", "prefault")
PROGRAM = """
import sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", num_threads=1, num_blocks=64, swap_space=0)
print(len(llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
"""
FORKING_PROGRAM = """
import os, sys
from quire import LLM
llm = LLM(sys.argv[1], dtype="float32", num_threads=1, num_blocks=64, swap_space=0)
child = os.fork()
if child == 0:
    try:
        llm.generate("hello")
    except RuntimeError as error:
        print(error)
    if sys.argv[2] == "closes":
        llm.close()
    sys.exit()
assert os.waitpid(child, 0) == (child, 0)
print(len(llm.generate("hello")), os.getpid())
"""


def threads() -> set[threading.Thread]:
    """The threads of models. A model that is not used any more may wait for a collection, as after an error whose
    traceback refers to it."""
    gc.collect()
    return threads_now()


def threads_now() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(OURS)}


def until(is_met: Callable[[], bool]) -> None:
    """Waits for a condition."""
    limit = time.monotonic() + 200
    while not is_met():
        assert time.monotonic() < limit, threads()
        time.sleep(0.01)


def is_running(llm: LLM) -> bool:
    (model,) = llm._thread.engine._scheduler.models
    return bool(model.core.num_running or model.core.num_queued)


def once_running(llm: LLM, act: Callable[[], object]) -> threading.Thread:
    """Acts, on another thread, as soon as a prompt runs."""

    def wait_and_act() -> None:
        until(lambda: is_running(llm))
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_an_interrupt_cancels_the_prompts_and_leaves_the_model_usable(load: Callable[..., LLM]) -> None:
    llm = load(num_blocks=64)
    short = SamplingParams(temperature=0, max_tokens=4)
    expected = llm.generate(["hello"] * 4, short)  # all threads run by now
    before = threads()
    interrupting = once_running(llm, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello"] * 1_000, LONG)
    interrupting.join()
    assert {thread.name for thread in threads() - before} <= {"tokenize_0", "tokenize_1", "tokenize_2"}
    until(lambda: not is_running(llm))
    again = llm.generate(["hello"] * 4, short)
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in expected]


def test_a_model_that_is_loaded_is_not_copied(load: Callable[..., LLM]) -> None:
    llm = load(num_blocks=64)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^a model that is loaded cannot be copied or pickled"):
            copied(llm)


def test_the_end_of_the_block_ends_all_threads(model: Path) -> None:
    before = threads()
    with LLM(str(model), **SMALL, num_blocks=32) as llm:
        llm.generate("hello", SamplingParams(max_tokens=2, structured_outputs={"choice": ["a"]}))
        assert threads() > before
    until(lambda: threads() <= before)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


def test_a_model_that_is_closed_is_freed_at_once(model: Path) -> None:
    llm = LLM(str(model), **SMALL, num_blocks=32)
    llm.generate("hello", SamplingParams(max_tokens=2))
    instance = llm._thread.engine._instance
    assert isinstance(instance, ModelInstance)
    parts = [weakref.ref(part) for part in (instance.runner._executor, instance.runner._swap_tracker)]
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert [part() for part in parts] == [None, None]  # although this test refers to the runner
    finally:
        gc.enable()


def test_a_model_that_is_dropped_ends_its_threads(model: Path) -> None:
    before = threads()
    llm = LLM(str(model), **SMALL, num_blocks=32)
    llm.generate("hello", SamplingParams(max_tokens=2))
    del llm
    until(lambda: threads() <= before)


@pytest.mark.parametrize("collector", ["loop", "device"])
def test_a_model_that_the_engine_s_own_thread_collects_ends_its_threads(model: Path, collector: str) -> None:
    before = threads()
    llm = LLM(str(model), **SMALL, num_blocks=32)
    loop, device = llm._thread._thread, llm._thread.engine._device
    cycle: list[object] = [llm]
    cycle.append(cycle)
    freed = weakref.ref(llm)

    async def collect() -> None:
        if collector == "loop":
            gc.collect()
        else:
            await device.run(gc.collect)

    gc.disable()
    try:
        del llm, cycle
        assert freed() is not None
        collected, _ = loop.start(collect())
        until(lambda: threads_now() <= before)
        collected.result(200)
        assert freed() is None
    finally:
        gc.enable()


def test_a_model_that_is_closed_on_its_own_loop_ends_its_threads(model: Path) -> None:
    before = threads()
    llm = LLM(str(model), **SMALL, num_blocks=32)

    async def close() -> None:
        llm.close()

    llm._thread.run(close())
    until(lambda: threads() <= before)


def test_calls_that_run_fail_when_the_model_is_closed(model: Path) -> None:
    llm = LLM(str(model), **SMALL, num_blocks=32)
    closing = once_running(llm, llm.close)
    with pytest.raises(QuireError, match="closed") as raised:
        llm.generate(["hello"] * 1_000, LONG)
    assert raised.value.reason == "CANCELLED"
    closing.join()


def test_a_model_that_cannot_be_loaded_leaves_no_thread(tmp_path: Path) -> None:
    before = threads()
    with pytest.raises(Exception, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    assert threads() <= before


def run_program(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of a user in a process of its own. Python 3.12 warns of each fork."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "protos", "kernels", "client"))
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_a_program_ends_without_closing_its_model(model: Path) -> None:
    done = run_program(PROGRAM, str(model))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize("end", ["closes", "exits"])
def test_a_fork_is_told_to_load_the_model_itself(end: str, model: Path) -> None:
    done = run_program(FORKING_PROGRAM, str(model), end)
    refusal, answer = done.stdout.splitlines()
    number, pid = answer.split()
    assert (done.returncode, done.stderr, number) == (0, "", "1")
    assert refusal.startswith(f"the model was loaded in process {pid}, and this is a fork of it")


def test_an_encoder_that_is_closed_is_freed_at_once(tmp_path: Path) -> None:
    save_bert(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_threads=1)
    llm.embed("hello")
    instance = llm._thread.engine._instance
    assert isinstance(instance, EncoderInstance)
    forward = weakref.ref(instance.runner._forward)
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert forward() is None
    finally:
        gc.enable()
