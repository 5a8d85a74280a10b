"""Worker, scheduler and gateway of one model in one process, on one event loop: the services' own parts, connected
without ports.

What a deployment has besides is left out: there are no listeners, no credentials, no lease and no records.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.request_group import SubscribedGroup
from gateway_svc.request_manager import RequestManager
from gateway_svc.retention import NONE, RetentionRules
from gateway_svc.session import SchedulerSession
from gateway_svc.unvalidated_request import GenerationDefaults
from quire.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from quire.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from quire_offline.engine_request import EngineRequest
from quire_offline.errors import noting_prompt
from quire_offline.local_channel import LocalServer
from quire_offline.null_store import NullStore
from quire_offline.settings import OfflineSettings
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import EngineSettings, SchedulerEngine
from scheduler_svc.sessions import SchedulerServicer
from scheduler_svc.worker_link import WorkerLink
from svc_common.doctor.prepared import is_prepared
from svc_common.errors import QuireError, Reason
from svc_common.gc_tuning import rare_collections
from svc_common.identity import Outbound
from svc_common.models import ModelNotFound
from svc_common.preparation import PreparationFailed
from svc_common.records import RECORD_TTL_SECONDS
from worker_svc.description import WorkerDescription
from worker_svc.device_thread import DeviceThread
from worker_svc.errors import StartupFailed
from worker_svc.host_memory import HostMemoryReader
from worker_svc.load import load_model
from worker_svc.memory_monitor import MemoryMonitor, PressureLevels
from worker_svc.service import WorkerService
from worker_svc.settings import WorkerSettings
from worker_svc.step_runner import StepInstance

logger = logging.getLogger("quire.offline")

_HERE = "this process"  # the address of worker and scheduler
_EPOCH = 1
_READY_SECONDS = 60.0  # from a loaded model to the first request; it takes milliseconds

R = TypeVar("R", bound=EngineRequest)


class OfflineEngine:
    """Runs requests for one model. All methods are called on the loop that made it."""

    def __init__(self, settings: OfflineSettings, catalog: ModelCatalog, device: DeviceThread) -> None:
        """The engine closes `catalog` and `device`."""
        self._settings = settings
        self._catalog = catalog
        self._device = device
        (self._model,) = catalog
        self._changed = asyncio.Event()
        worker = settings.worker
        self._memory = MemoryMonitor(
            HostMemoryReader(worker.memory_limit_bytes), PressureLevels(worker.memory_high, worker.memory_critical)
        )
        self._worker = WorkerService(device, memory=self._memory)
        worker_server, scheduler_server = LocalServer(), LocalServer()
        add_WorkerServiceServicer_to_server(self._worker, worker_server.registry)
        self._scheduler = SchedulerEngine(
            partial(Scheduler, settings.limits),
            NullStore(),
            _EPOCH,
            EngineSettings(worker_timeout=math.inf),
            _no_later_term,
            on_fenced=lambda: None,  # nothing else leads
            on_failed=self._fail,
        )
        servicer = SchedulerServicer()
        servicer.lead(self._scheduler)
        add_SchedulerServiceServicer_to_server(servicer, scheduler_server.registry)
        self._link = WorkerLink(self._scheduler, _HERE, lambda: None, Outbound(worker_server.channel))
        self._session = SchedulerSession(
            [_HERE], catalog.fingerprints, self._changed.set, outbound=Outbound(scheduler_server.channel)
        )
        # Without records: the store would forget them.
        retention = RetentionRules(RECORD_TTL_SECONDS, NONE, NONE)
        self.manager = RequestManager(catalog, self._session, GatewayMetrics([self._model.name]), retention)
        """What runs the requests of any protocol."""
        self._requests: dict[str, EngineRequest] = {}  # those of `run`, by id
        self._groups: dict[str, SubscribedGroup[Any]] = {}  # of requests that have begun, by id
        self._calls: dict[str, asyncio.Task[None]] = {}  # those of `run_call`, by id
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: QuireError | None = None
        self._instance: StepInstance | None = None
        self.description: WorkerDescription
        """What the worker is: model, device, dtype, limits."""

    @property
    def undefined_fields(self) -> UndefinedFields:
        """What is done about fields of bodies that no API defines."""
        return self._settings.undefined_fields

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels of the model's head; empty: it has none."""
        return self._model.labels

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """Of requests that do not set a field."""
        return self._model.defaults

    def load_tokenizer(self) -> Any:
        """The tokenizer of the model's files, as transformers loads it. Raises OSError and ValueError."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._settings.model.resolve().tokenizer_path, local_files_only=True)

    @property
    def failure(self) -> QuireError | None:
        """Why no request can run any more; None: they can."""
        return self._failure

    @classmethod
    async def start(cls, settings: OfflineSettings) -> "OfflineEngine":
        """Loads the model, in seconds to minutes; one that is not there yet is downloaded or converted first. Raises
        ModelNotFound, InvalidModelFiles, BadSetting and StartupFailed.
        """
        await asyncio.to_thread(_prepare, settings.worker)
        catalog = ModelCatalog.load([settings.model], settings.max_logprobs, settings.seed)
        engine = cls(settings, catalog, DeviceThread())
        try:
            await engine._load()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _load(self) -> None:
        self._instance = await self._device.run(partial(load_model, self._settings.worker, logger.info))
        self._memory.watch_parts(self._instance.memory.read)
        self.description = self._instance.description
        self._worker.serve(self._instance)
        for name, work in (
            ("session", self._session.run()),
            ("worker", self._link.run()),
            ("device", self._until_device_lost()),
        ):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._part_ended)
            self._tasks.append(task)
        try:
            async with asyncio.timeout(_READY_SECONDS):
                while not self.manager.is_ready and self._failure is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise StartupFailed(f"the worker did not accept steps in {_READY_SECONDS:.0f} s") from None
        self._check()

    async def close(self) -> None:
        """Fails the requests that run, ends the threads of steps and of tokenizers, and frees the model."""
        self._end_all(QuireError(Reason.CANCELLED, "the engine was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._memory.close()
        self._device.close()
        if self._instance is not None:
            self._instance.close()
        self._catalog.close()

    async def run_all(self, requests: Sequence[R], on_progress: Callable[[R], None]) -> None:
        """Runs all requests of a call at once. `on_progress` is called on this loop with a request that has more of its
        result, and at its end.

        Those that may have most tokens are queued first: one that begins last and is long would run alone in the end.

        Raises the QuireError of the first one that is not valid or fails; the others end then.
        """

        def noting(index: int) -> AbstractContextManager[None]:
            numbered = requests[index].has_numbered_fields
            return nullcontext() if numbered else noting_prompt(index, len(requests))

        async def run(index: int) -> None:
            with noting(index):
                await self._run(requests[index], on_progress)

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in sorted(range(len(requests)), key=lambda index: -requests[index].max_tokens):
                    # One after another, so that they are queued in this order. Those before this one run meanwhile.
                    with noting(index):
                        await self._validate(requests[index])
                    tasks.create_task(run(index))
        except* QuireError as errors:
            first = errors.exceptions[0]
        else:
            return
        raise first

    async def run_call(self, request_id: str, requests: Sequence[R]) -> None:
        """Runs all requests of a call whose result is known only as a whole, as `run_all`. No other request or call
        that runs may have its id. Raises QuireError CANCELLED where `abort` ended it.
        """
        self._require_free(request_id)
        work = self._calls[request_id] = asyncio.create_task(self.run_all(requests, lambda _: None))
        try:
            await work
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise _aborted() from None
        finally:
            del self._calls[request_id]

    async def run(self, request: R, on_progress: Callable[[R], None]) -> None:
        """Runs one request, which `abort` may end. As `run_all`; no other request or call that runs may have its id."""
        self._require_free(request.request_id)
        self._requests[request.request_id] = request
        try:
            await self._validate(request)
            await self._run(request, on_progress)
        finally:
            del self._requests[request.request_id]

    def abort(self, request_id: str) -> None:
        """Ends a request, if it runs: its output so far is its answer; or a call, which has none then."""
        if (call := self._calls.get(request_id)) is not None:
            call.cancel()
        elif (group := self._groups.get(request_id)) is not None:
            group.give_up(_aborted())
        elif request_id in self._requests:  # it has not begun
            self._requests[request_id].was_aborted = True

    def _require_free(self, request_id: str) -> None:
        """Raises QuireError where something that runs has this id."""
        if request_id in self._requests or request_id in self._calls:
            raise QuireError(Reason.INVALID_FIELD, "is the id of a request that runs", field="request_id")

    async def _validate(self, request: EngineRequest) -> None:
        """Raises QuireError."""
        self._check()
        await request.validate(self.manager, self._model)

    async def _run(self, request: R, on_progress: Callable[[R], None]) -> None:
        self._check()
        if request.was_aborted:
            return

        def on_start(group: SubscribedGroup[Any]) -> None:
            self._groups[request.request_id] = group

        try:
            with rare_collections():
                await request.compute(self.manager, on_start, lambda: on_progress(request))
        except QuireError as error:
            if error.reason is not Reason.CANCELLED or self._failure is not None:
                raise self._failure or error from None
            request.was_aborted = True
        finally:
            self._groups.pop(request.request_id, None)
        request.is_done = True
        on_progress(request)

    def _check(self) -> None:
        """Raises QuireError where the engine cannot run requests any more."""
        if self._failure is not None:
            raise self._failure

    # Failures.

    async def _until_device_lost(self) -> None:
        await self._worker.device_lost.wait()
        self._end_all(QuireError(Reason.INTERNAL, "the device failed in a step: make a new LLM, in a new process"))

    def _fail(self, error: BaseException) -> None:
        """The scheduler's own part cannot go on."""
        logger.error("the engine failed", exc_info=error)
        self._end_all(QuireError(Reason.INTERNAL, f"the engine failed: {type(error).__name__}"))

    def _part_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _end_all(self, error: QuireError) -> None:
        """Fails the requests that run, and all later ones."""
        self._failure = self._failure or error
        self._changed.set()
        self.manager.give_up(error)


def _aborted() -> QuireError:
    return QuireError(Reason.CANCELLED, "the request was aborted")


async def _no_later_term(above: int) -> int:
    raise AssertionError(f"a worker of this process has seen epoch {above}")


def _prepare(settings: WorkerSettings) -> None:
    """Downloads or converts the model and the tokenizer, unless they are there. Raises StartupFailed."""
    model, *others = settings.model, settings.revision, settings.tokenizer, settings.tokenizer_revision
    try:
        if is_prepared(model, *others, with_weights=True):
            return
        from worker_svc.prepare import prepare  # its modules take seconds to import

        prepare(model, logger.info, *others)
    except ModelNotFound:
        return  # the catalog says so, by the name of the setting
    except PreparationFailed as error:
        raise StartupFailed(str(error)) from error
