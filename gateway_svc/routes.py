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
from gateway_svc.route import Farewell, Reader, Route, Seat
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

    def __init__(self, send: Callable[[scheduler_pb2.SessionRequest], None], patience: float) -> None:
        """`send` takes what is sent while a session is open, and drops what is sent otherwise. `patience` is how many
        seconds a request that no scheduler knew waits for one that runs it anew."""
        self._send = send
        self._patience = patience
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
        """Takes out a reader whose client left or, with None, has all of the request."""
        if on_leave is None and route.cuts and route.seats == (seat,):
            self._verdicts.add(route.key, route.submission_id, route.cuts)
        self._remove(route, seat, on_leave)

    def finish(self, route: Route, index: int, num_tokens: int) -> None:
        """Tells of a stop string, once, whoever finds it."""
        if index not in route.cuts:
            route.cuts[index] = num_tokens
            self._send_finish(route, index)

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
            self._send(scheduler_pb2.SessionRequest(finish=verdict))
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
            self._bid_farewell(route)

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
                self._verdicts.settle(event.key, event.durable)
                if route.is_attached:
                    route.watermarks[event.durable.index] = event.durable.num_tokens
            elif not event.HasField("attachment_id"):
                # Who waits gets an answer of its own.
                if kind == "failed":
                    for seat in route.seats:
                        self._fail(route, seat, _error_of(event.failed, seat))
            elif route.question is not None and event.attachment_id == route.question.attachment_id:
                newcomer, route.question = route.question.newcomer, None
                self._take_answer(route, newcomer, event)
                self._ask(route)
            elif kind != "failed" and not route.seats:
                # Who asked has left before the answer came, and who is asked for now may not be let in.
                route.farewell = route.farewell or scheduler_pb2.Detach(key=route.key)
                self._ask(route)
        except Exception:
            # Whatever is wrong with it, no other request is to suffer.
            error = refusals.internal("an event could not be handled")
            self._fail_all(route, error, OnLeave.CANCEL)

    def _take_answer(self, route: Route, newcomer: Seat | None, event: scheduler_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "accepted":
                route.attach()
                if newcomer is not None:
                    assert newcomer.submit is not None, "only a submission is accepted"
                    route.run(newcomer.submit, newcomer.deadline)
                    route.seat(newcomer)
                    newcomer.reader.on_accepted(event.accepted.is_durable)
            case "attached":
                route.attach()
                if newcomer is not None:
                    route.seat(newcomer)
                self._merge(route, newcomer, event.attached)
            case "failed" if newcomer is not None:
                self._fail(route, newcomer, _error_of(event.failed, newcomer))
            case "failed" if event.failed.reason == scheduler_pb2.FAILURE_REASON_UNKNOWN_REQUEST:
                route.is_unknown = True
                route.watermarks = {}
                if route.submit is None:
                    self._fail_seats(route, refusals.unavailable("the request was lost with its scheduler"))
                elif route.rescue is None:
                    loop = asyncio.get_running_loop()
                    route.rescue = loop.call_later(self._patience, self._give_up_rescue, route)
            case "failed" if event.failed.reason == scheduler_pb2.FAILURE_REASON_DIVERGED and route.watermarks:
                # The store has lost what it had, and needs all that is here.
                route.watermarks = {}
            case "failed":
                for seat in route.seats:
                    self._fail(route, seat, _error_of(event.failed, seat))

    def _merge(self, route: Route, newcomer: Seat | None, attached: scheduler_pb2.Attached) -> None:
        """Takes in what a scheduler has of a request: for a newcomer, or for all where the scheduler is new."""
        route.submission_id = attached.submission_id
        if newcomer is not None and newcomer.submit is not None and route.submit is None:
            # The same request, but for what was drawn for it. The deadline of who only joins it ends that call alone.
            is_own = newcomer.submit.submission_id == attached.submission_id
            submit = scheduler_pb2.Submit()
            submit.CopyFrom(newcomer.submit)
            submit.submission_id = attached.submission_id
            submit.sampling.seed = attached.seed
            submit.ClearField("is_resumption")
            route.run(submit, newcomer.deadline if is_own else None)
        for tokens in attached.sequences:
            is_cut_there = tokens.HasField("end") and tokens.end.HasField("stop_string")
            if is_cut_there:
                route.cuts[tokens.index] = tokens.offset + len(tokens.token_ids)
            elif tokens.index in route.cuts:
                self._send_finish(route, tokens.index)
        for seat in route.seats if newcomer is None else (newcomer,):
            seat.reader.on_attached(attached)

    def _take_for_nobody(self, event: scheduler_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "accepted" | "attached":
                # Who asked has left before the answer came.
                self._send(scheduler_pb2.SessionRequest(detach=scheduler_pb2.Detach(key=event.key)))
            case "durable":
                self._verdicts.settle(event.key, event.durable)
            case "failed" if not event.HasField("attachment_id"):
                self._verdicts.forget(event.key)

    # What is asked of the scheduler.

    def _ask_all(self) -> None:
        for route in list(self._routes.values()):
            self._ask(route)

    def _ask(self, route: Route) -> None:
        """Asks what is to be asked next, if anything: what runs here goes before who wants to join it."""
        if route.question is not None:
            return
        self._bid_farewell(route)
        if not self._is_open:
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

    def _send_finish(self, route: Route, index: int) -> None:
        finish = scheduler_pb2.Finish(
            key=route.key, index=index, num_tokens=route.cuts[index], submission_id=route.submission_id
        )
        self._send(scheduler_pb2.SessionRequest(finish=finish))

    def _send_cancel(self, cancel: scheduler_pb2.Cancel) -> None:
        if self._is_open:
            self._send(scheduler_pb2.SessionRequest(cancel=cancel))
        else:
            # The next scheduler may run it on, for nobody.
            self._owed.append(cancel)

    # Ends.

    def _remove(self, route: Route, seat: Seat, on_leave: OnLeave | None) -> None:
        """Takes a reader out; the last one decides what becomes of the request, unless one that was asked for joins."""
        farewell, was_waiting = route.farewell_of(seat, on_leave), seat not in route.seats
        if not route.remove(seat):
            return
        if was_waiting and isinstance(farewell, scheduler_pb2.Cancel):
            self._send_cancel(farewell)  # of its own submission, which nobody else can have joined here
        elif not route.seats and route.farewell is None:
            route.farewell = farewell
        if route.seats or route.waiting:
            self._ask(route)
        else:
            del self._routes[route.key]
            self._bid_farewell(route)

    def _bid_farewell(self, route: Route) -> None:
        farewell: Farewell | None
        farewell, route.farewell = route.farewell, None
        if isinstance(farewell, scheduler_pb2.Cancel):
            self._send_cancel(farewell)
        elif farewell is not None:
            self._send(scheduler_pb2.SessionRequest(detach=farewell))

    def _give_up_rescue(self, route: Route) -> None:
        route.rescue = None
        self._fail_seats(route, refusals.unavailable("no scheduler can run the request anew"), OnLeave.DETACH)

    def _fail(self, route: Route, seat: Seat, error: QuireError, on_leave: OnLeave | None = None) -> None:
        self._remove(route, seat, on_leave)
        seat.reader.on_failed(error)

    def _fail_seats(self, route: Route, error: QuireError, on_leave: OnLeave | None = None) -> None:
        for seat in route.seats:
            self._fail(route, seat, error, on_leave)

    def _fail_all(self, route: Route, error: QuireError, on_leave: OnLeave | None = None) -> None:
        # Those that wait go first, the last of them before the others: else they would be asked for in between.
        for seat in (*reversed(route.waiting), *route.seats):
            self._fail(route, seat, error, on_leave)


def _error_of(failed: scheduler_pb2.Failed, seat: Seat) -> QuireError:
    tenant = "" if seat.submit is None else seat.submit.tenant
    return refusals.error_of(failed, seat.reader.spell, tenant)
