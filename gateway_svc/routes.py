"""Requests and who reads them here: what the scheduler tells goes to its readers, and what a new scheduler must be told
is told."""

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable

from gateway_svc import refusals
from gateway_svc.generation import OnLeave
from gateway_svc.route import Reader, Route, Seat
from gateway_svc.verdicts import Verdicts
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError

_MAX_OWED = 10_000


class Attachment:
    """A reader's hold on a request."""

    __slots__ = ("_route", "_routes", "_seat")

    def __init__(self, routes: "Routes", route: Route, seat: Seat) -> None:
        self._routes = routes
        self._route = route
        self._seat = seat

    def release(self, on_leave: OnLeave | None) -> None:
        """Ends it: because its client left, or, with None, because the request is over."""
        self._routes.release(self._route, self._seat, on_leave)

    def finish(self, index: int, num_tokens: int) -> None:
        """Tells that a stop string ended a sequence at `num_tokens`."""
        self._routes.finish(self._route, index, num_tokens)

    def acknowledge(self, index: int, num_tokens: int) -> None:
        """Tells that stop strings were looked for in `num_tokens`."""
        self._routes.acknowledge(self._route, index, num_tokens)


class Routes:
    """All requests of this gateway. What was sent to a session that broke is made good at the next one."""

    def __init__(self, send: Callable[[scheduler_pb2.SessionRequest], None]) -> None:
        """`send` takes what is sent while a session is open, and drops what is sent otherwise."""
        self._send = send
        self._routes: dict[str, Route] = {}
        self._attachment_ids = itertools.count(1)
        self._verdicts = Verdicts()
        self._owed: deque[scheduler_pb2.Cancel] = deque(maxlen=_MAX_OWED)
        self._is_open = False
        self._takes_submissions = False

    # What clients want.

    def ask(self, key: str, submit: scheduler_pb2.Submit | None, reader: Reader, deadline: float | None) -> Attachment:
        """Lets a reader take part in a request: the one that `submit` asks for or, with None, one that must be there.

        `deadline` is on the monotonic clock, in seconds.
        """
        if submit is not None:
            submit.submission_id = uuid.uuid4().hex
            self._verdicts.forget(key)
        route = self._routes.setdefault(key, Route(key))
        seat = Seat(reader, submit, deadline)
        if deadline is not None:
            # The scheduler looks too; this one holds even where no scheduler can be reached.
            seconds = max(deadline - time.monotonic(), 0.0)
            error = refusals.deadline_exceeded()
            seat.expiry = asyncio.get_running_loop().call_later(seconds, self._fail, route, seat, error, OnLeave.CANCEL)
        route.waiting.append(seat)
        self._ask(route)
        return Attachment(self, route, seat)

    def cancel(self, key: str) -> bool:
        """Ends a request, here or on any other gateway; False where nobody can be told and nothing of it is here."""
        route = self._routes.get(key)
        if route is None and not self._is_open:
            return False
        self._send_cancel(scheduler_pb2.Cancel(key=key))
        if route is not None and not route.is_attached:
            # The scheduler may not know of it yet, and must not be told of it any more.
            self._fail_all(route, refusals.cancelled())
        return True

    def release(self, route: Route, seat: Seat, on_leave: OnLeave | None) -> None:
        """Takes a reader out; the last one decides what becomes of the request."""
        submit, cuts = route.submit or seat.submit, route.cuts
        if not route.remove(seat):
            return
        if cuts and not route.seats:
            self._verdicts.add(route.key, cuts)
        if route.seats or route.waiting:
            self._ask(route)
            return
        del self._routes[route.key]
        match on_leave:
            case OnLeave.CANCEL if seat.submit is not None and submit is not None:
                # Ends our own submission, and no other gateway's under the same key.
                self._send_cancel(scheduler_pb2.Cancel(key=route.key, submission_id=submit.submission_id))
            case OnLeave.CANCEL | OnLeave.DETACH:
                self._send(scheduler_pb2.SessionRequest(detach=scheduler_pb2.Detach(key=route.key)))

    def finish(self, route: Route, index: int, num_tokens: int) -> None:
        """Tells of a stop string, once, whoever finds it."""
        if index not in route.cuts:
            route.cuts[index] = num_tokens
            self._send_finish(scheduler_pb2.Finish(key=route.key, index=index, num_tokens=num_tokens))

    def acknowledge(self, route: Route, index: int, num_tokens: int) -> None:
        """Tells how far stop strings were looked for."""
        acknowledge = scheduler_pb2.Acknowledge(key=route.key, index=index, num_tokens=num_tokens)
        self._send(scheduler_pb2.SessionRequest(acknowledge=acknowledge))

    # What becomes of the session.

    def open(self) -> None:
        """A session began, with a scheduler that may know nothing of what runs here."""
        self._is_open = True
        while self._owed:
            self._send_cancel(self._owed.popleft())
        for verdict in self._verdicts:
            self._send_finish(verdict)
        self._ask_all()

    def take_submissions(self, takes: bool) -> None:
        """Whether the scheduler serves the model that requests are for."""
        was_taking, self._takes_submissions = self._takes_submissions, takes
        if takes and not was_taking:
            self._ask_all()

    def close(self) -> None:
        """The session is over."""
        self._is_open = self._takes_submissions = False
        for route in self._routes.values():
            route.disconnect()

    def give_up_waiting(self, error: QuireError) -> None:
        """Fails what no scheduler has accepted."""
        for route in list(self._routes.values()):
            for seat in list(route.waiting):
                if seat.submit is not None or not self._is_open:
                    self._fail(route, seat, error, OnLeave.CANCEL)

    def give_up(self, error: QuireError) -> None:
        """Fails everything."""
        for route in list(self._routes.values()):
            self._fail_all(route, error)

    # What the scheduler tells.

    def take(self, event: scheduler_pb2.Event) -> None:
        """Takes an event to those whom it concerns. One that cannot be handled fails its request alone."""
        route = self._routes.get(event.key)
        if route is None:
            self._take_for_nobody(event)
            return
        try:
            kind = event.WhichOneof("kind")
            if kind == "tokens":
                # Others are those of a request that had the key before, or do not follow what is here.
                if route.is_attached:
                    tokens = event.tokens
                    for seat in route.seats:
                        seat.reader.on_tokens(tokens)
            elif kind == "durable":
                route.watermarks[event.durable.index] = event.durable.num_tokens
            elif not event.HasField("attachment_id"):
                if kind == "failed":
                    for seat in route.seats or tuple(route.waiting):
                        self._fail(route, seat, _error_of(event.failed, seat))
            elif route.question is not None and event.attachment_id == route.question.attachment_id:
                newcomer, route.question = route.question.newcomer, None
                self._take_answer(route, newcomer, event)
                self._ask(route)
        except Exception:
            # Whatever is wrong with it, no other request is to suffer.
            error = refusals.internal("an event could not be handled")
            self._send_cancel(scheduler_pb2.Cancel(key=event.key))
            self._fail_all(route, error)

    def _take_answer(self, route: Route, newcomer: Seat | None, event: scheduler_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "accepted":
                route.is_attached = True
                if newcomer is not None:
                    route.submit, route.deadline = newcomer.submit, newcomer.deadline
                    route.seat(newcomer)
                    newcomer.reader.on_accepted(event.accepted.is_durable)
            case "attached":
                route.is_attached = True
                if newcomer is not None:
                    route.seat(newcomer)
                self._merge(route, newcomer, event.attached)
            case "failed" if newcomer is not None:
                self._fail(route, newcomer, _error_of(event.failed, newcomer))
            case "failed" if event.failed.reason == scheduler_pb2.FAILURE_REASON_UNKNOWN_REQUEST:
                route.is_unknown = True
                if route.submit is None:
                    self._fail_seats(route, refusals.unavailable("the request was lost with its scheduler"))
            case "failed":
                for seat in route.seats:
                    self._fail(route, seat, _error_of(event.failed, seat))

    def _merge(self, route: Route, newcomer: Seat | None, attached: scheduler_pb2.Attached) -> None:
        """Takes in what a scheduler has of a request: for a newcomer, or for all where the scheduler is new."""
        if newcomer is not None and newcomer.submit is not None and route.submit is None:
            # The same request, but for what was drawn for it.
            route.submit, route.deadline = newcomer.submit, newcomer.deadline
            route.submit.submission_id = attached.submission_id
            route.submit.sampling.seed = attached.seed
        for tokens in attached.sequences:
            is_cut_there = tokens.HasField("end") and tokens.end.HasField("stop_string")
            if is_cut_there:
                route.cuts[tokens.index] = tokens.offset + len(tokens.token_ids)
            elif tokens.index in route.cuts:
                num_tokens = route.cuts[tokens.index]
                self._send_finish(scheduler_pb2.Finish(key=route.key, index=tokens.index, num_tokens=num_tokens))
        for seat in route.seats if newcomer is None else (newcomer,):
            seat.reader.on_attached(attached)

    def _take_for_nobody(self, event: scheduler_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "accepted" | "attached":
                # Who asked has left before the answer came.
                self._send(scheduler_pb2.SessionRequest(detach=scheduler_pb2.Detach(key=event.key)))
            case "durable":
                self._verdicts.settle(event.key, event.durable)
            case "failed":
                self._verdicts.forget(event.key)

    # What is asked of the scheduler.

    def _ask_all(self) -> None:
        for route in list(self._routes.values()):
            self._ask(route)

    def _ask(self, route: Route) -> None:
        """Asks what is to be asked next, if anything: what runs here goes before who wants to join it."""
        if not self._is_open or route.question is not None:
            return
        newcomer = None
        if route.is_attached or not route.seats:
            if not route.waiting:
                return
            newcomer = route.waiting[0]
        submits = route.is_unknown if newcomer is None else newcomer.submit is not None
        if not submits:
            attach = route.to_attach(newcomer, next(self._attachment_ids))
            self._send(scheduler_pb2.SessionRequest(attach=attach))
        elif self._takes_submissions:
            submit = route.to_submit(newcomer, next(self._attachment_ids))
            self._send(scheduler_pb2.SessionRequest(submit=submit))

    def _send_finish(self, finish: scheduler_pb2.Finish) -> None:
        self._send(scheduler_pb2.SessionRequest(finish=finish))

    def _send_cancel(self, cancel: scheduler_pb2.Cancel) -> None:
        if self._is_open:
            self._send(scheduler_pb2.SessionRequest(cancel=cancel))
        else:
            # The next scheduler may run it on, for nobody.
            self._owed.append(cancel)

    # Ends.

    def _fail(self, route: Route, seat: Seat, error: QuireError, on_leave: OnLeave | None = None) -> None:
        self.release(route, seat, on_leave)
        seat.reader.on_failed(error)

    def _fail_seats(self, route: Route, error: QuireError) -> None:
        for seat in route.seats:
            self._fail(route, seat, error)

    def _fail_all(self, route: Route, error: QuireError) -> None:
        for seat in (*route.seats, *route.waiting):
            self._fail(route, seat, error)


def _error_of(failed: scheduler_pb2.Failed, seat: Seat) -> QuireError:
    tenant = "" if seat.submit is None else seat.submit.tenant
    return refusals.error_of(failed, seat.reader.spell, tenant)
