"""A worker whose forward pass sleeps and samples token 0; all else is the worker's own code.

    python -m benchmarks.steps.worker --port PORT --forward SECONDS --sequences N --times FILE

At SIGTERM it writes when each step was submitted, begun and done, in seconds of the machine's monotonic clock.
"""

import argparse
import asyncio
import ctypes
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import uvloop

from benchmarks.steps.report import DeviceTimes
from quire.worker.v1 import worker_pb2_grpc
from svc_common.gc_tuning import freeze_gc
from svc_common.server import INTERNAL_MESSAGE_BYTES, bind, create_server, run_until_signal
from worker_svc.block_hashes import BlockHashTable
from worker_svc.description import WorkerDescription, WorkerLimits
from worker_svc.device_thread import DeviceThread, Launched, Timed
from worker_svc.service import WorkerService
from worker_svc.step import SequenceResult, Step, StepOutcome

if TYPE_CHECKING:
    from worker_svc.step_runner import StepInstance

T = TypeVar("T")
L = TypeVar("L", bound=Launched)

BLOCK_SIZE = 16
CONTEXT_LENGTH = 4096
_PR_SET_TIMERSLACK = 29


class RecordingThread(DeviceThread):
    """Records when each step was submitted."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[float] = []

    def submit_step(self, launch: Callable[[], L], finish: Callable[[L], T]) -> "Future[Timed[T]]":
        self.submitted.append(time.perf_counter())
        return super().submit_step(launch, finish)


@dataclass(frozen=True, slots=True)
class Sleep:
    """A step on a simulated device: it begins when the one launched before it is done."""

    results: list[SequenceResult]
    begun: float
    done: float

    def is_done(self) -> bool:
        return time.perf_counter() >= self.done

    def wait(self) -> None:
        if (seconds := self.done - time.perf_counter()) > 0:
            time.sleep(seconds)


class SleepingRunner:
    """Counts the tokens of its sequences, and samples token 0 where all of them are computed."""

    def __init__(self, limits: WorkerLimits, forward_seconds: float) -> None:
        self.limits = limits
        self.block_hashes = BlockHashTable()
        self.sleeps: list[Sleep] = []
        self._forward_seconds = forward_seconds
        self._num_tokens: dict[int, int] = {}

    def reset(self) -> None:
        self._num_tokens.clear()

    def launch(self, step: Step) -> Sleep:
        self.block_hashes.update(step.block_hashes, step.host_block_hashes)
        for sequence_id in step.finished_ids:
            self._num_tokens.pop(sequence_id, None)
        for new in step.new_sequences:
            self._num_tokens[new.sequence_id] = len(new.token_ids)
        results = []
        for item in step.scheduled:
            samples = item.start + item.num_tokens == self._num_tokens[item.sequence_id]
            self._num_tokens[item.sequence_id] += samples
            results.append(SequenceResult(item.sequence_id, [0] if samples else []))
        begun = max(time.perf_counter(), self.sleeps[-1].done if self.sleeps else 0.0)
        self.sleeps.append(Sleep(results, begun, begun + self._forward_seconds))
        return self.sleeps[-1]

    def finish(self, launched: Sleep) -> StepOutcome:
        launched.wait()
        return StepOutcome(launched.results, launched.done - launched.begun)


@dataclass(frozen=True)
class SleepingReplica:
    """A model that a service can serve, without torch."""

    description: WorkerDescription
    runner: SleepingRunner


def make_replica(num_sequences: int, forward_seconds: float) -> SleepingReplica:
    """A model without weights, with blocks for as many sequences of a whole context."""
    limits = WorkerLimits(
        vocab_size=1024,
        context_length=CONTEXT_LENGTH,
        block_size=BLOCK_SIZE,
        num_blocks=(num_sequences + 1) * CONTEXT_LENGTH // BLOCK_SIZE,
        max_step_tokens=8192,
        max_sequences=1024,
    )
    description = WorkerDescription("sleep", b"sleep", b"sleep", 1, limits, "float32", "cpu")
    return SleepingReplica(description, SleepingRunner(limits, forward_seconds))


async def serve(port: int, replica: SleepingReplica) -> list[DeviceTimes]:
    """Serves until a signal, and returns the steps' times."""
    thread = RecordingThread()
    service = WorkerService(thread)
    server = create_server(max_message_bytes=INTERNAL_MESSAGE_BYTES)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    bind(server, "127.0.0.1", port)
    service.serve(cast("StepInstance", replica))
    await server.start()
    freeze_gc()
    await run_until_signal(lambda: server.stop(0))
    thread.close()
    steps = zip(thread.submitted, replica.runner.sleeps, strict=False)  # the last ones may not have been launched
    return [DeviceTimes(submitted, sleep.begun, sleep.done) for submitted, sleep in steps]


def main() -> None:
    """Reads flags, serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--forward", type=float, required=True, help="seconds that a forward pass takes")
    parser.add_argument("--sequences", type=int, required=True, help="how many there is room for")
    parser.add_argument("--times", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    # Linux wakes a sleeper 50 µs late, unless it is asked not to; threads take over what is asked here.
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        steps = runner.run(serve(options.port, make_replica(options.sequences, options.forward)))
    options.times.write_text(json.dumps([[step.submitted, step.begun, step.done] for step in steps]))


if __name__ == "__main__":
    main()
