"""The models that are served. Each version of a model has its own core: queue, replicas and prefix index."""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import NamedTuple

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.totals import Totals


class WorkerName(NamedTuple):
    """A worker by its address, and the model that it serves."""

    address: str
    model: str


class ModelVersion:
    """One version of a model, and the workers that have it.

    `name` is the name under which it is served. `fingerprint` distinguishes versions of one name: it changes with
    anything that changes keys and values. It is empty where requests without tokens wait for any version of the name.
    `description` is that of the latest worker, or None. Requests can be submitted while it `is_listed`: from its first
    worker on, until it has been without workers for too long.
    """

    def __init__(self, name: str, fingerprint: bytes, core: Scheduler, created_at: float) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.core = core
        self.description: worker_v1.DescribeResponse | None = None
        self.started_at = math.inf
        """When the first of its workers in this term started, in seconds since 1970."""
        self.is_listed = False
        self.without_workers_since: float | None = created_at
        self.lost_at: set[str] = set()
        """Addresses of lost workers, which may come back with this version."""
        self._wakes: dict[Replica, asyncio.Event] = {}

    @property
    def tokenizer(self) -> bytes:
        """The fingerprint of its tokenizer; empty while that is not known."""
        return self.description.tokenizer_fingerprint if self.description is not None else b""

    @property
    def num_workers(self) -> int:
        """Its workers, including those that drain."""
        return len(self._wakes)

    @property
    def num_taking(self) -> int:
        """Its workers that accept new requests."""
        return sum(not replica.is_retired for replica in self._wakes)

    def add_worker(self, replica: Replica, wake: asyncio.Event, description: worker_v1.DescribeResponse) -> None:
        """A worker is ready; `wake` is set whenever there may be work for it."""
        self._wakes[replica] = wake
        self.description = description
        self.started_at = min(self.started_at, description.started_at.ToNanoseconds() / 1e9)
        self.is_listed = True
        self.without_workers_since = None

    def remove_worker(self, replica: Replica, now: float) -> None:
        """A worker is lost, or has drained: a drained one is not expected back."""
        del self._wakes[replica]
        if not replica.is_retired:
            self.lost_at.add(replica.name)
        if not self._wakes:
            self.without_workers_since = now

    def wake(self) -> None:
        """Lets all of its workers make a step."""
        for wake in self._wakes.values():
            wake.set()

    def wake_placed(self) -> None:
        """Lets workers make a step that were given sequences while another one's step was planned."""
        for replica in self.core.take_placed():
            self._wakes[replica].set()

    def to_proto(self, memory_pressure: worker_v1.MemoryPressure) -> scheduler_v1.Model:
        """The model for gateways. It must have had a worker. `memory_pressure` is the highest of its name's workers."""
        assert self.description is not None
        return scheduler_v1.Model(
            name=self.name,
            tokenizer_fingerprint=self.description.tokenizer_fingerprint,
            context_length=self.core.context_length,
            vocab_size=self.description.vocab_size,
            memory_pressure=memory_pressure,
        )


class ModelVersions:
    """All versions, in order of arrival.

    While workers are being replaced, a model may have two versions. A request with tokens continues on workers of the
    version that computed them. All others go to the preferred version, or to the preferred one of their tokenizer:
    versions with another tokenizer cannot run them.
    """

    def __init__(self, make_core: Callable[[], Scheduler], worker_timeout: float) -> None:
        """`worker_timeout` is how many seconds a version without workers is expected to come back."""
        self.all_connected = False
        """Whether every worker that is known by address accepts steps."""
        self._make_core = make_core
        self._worker_timeout = worker_timeout
        self._versions: list[ModelVersion] = []
        self._discarded_totals: dict[str, Totals] = {}  # by name
        self._names: dict[str, None] = {}  # of models that workers have had, in order of arrival

    def __iter__(self) -> Iterator[ModelVersion]:
        return iter(self._versions)

    @property
    def listed(self) -> list[ModelVersion]:
        """The versions for new requests: for each name one for each tokenizer, the preferred one last."""
        return [version for name in self._names for version in self._listed(name)]

    def _listed(self, name: str) -> list[ModelVersion]:
        preferred = self.serving(name)
        if preferred is None:
            return []
        tokenizers = dict.fromkeys(version.tokenizer for version in self._listed_as(name))
        of_tokenizers = [self.serving(name, tokenizer) for tokenizer in tokenizers if tokenizer != preferred.tokenizer]
        return [version for version in of_tokenizers if version is not None and version.num_taking] + [preferred]

    @property
    def first(self) -> ModelVersion | None:
        """The preferred version of the first model that is listed."""
        return next((version for name in self._names if (version := self.serving(name)) is not None), None)

    def serving(self, name: str, tokenizer: bytes = b"") -> ModelVersion | None:
        """The preferred version of a name, for new requests: the one with the most workers that accept requests.

        Of equal ones it is the one whose workers started last, which is the same for each leader. With a `tokenizer`,
        the preferred one that has it. None: no worker has it, or has had it for too long. The empty name, which
        gateways of protocol 1 may send, is the first model's.
        """
        versions = [one for one in self._listed_as(name) if tokenizer in (b"", one.tokenizer)]
        return max(versions, key=lambda one: (one.num_taking, one.num_workers, one.started_at), default=None)

    def _listed_as(self, name: str) -> list[ModelVersion]:
        """The listed versions of a name, the latest first."""
        name = name or next(iter(self._names), "")
        return [version for version in reversed(self._versions) if version.name == name and version.is_listed]

    def find(self, name: str, fingerprint: bytes) -> ModelVersion | None:
        """The version of a model with this fingerprint."""
        versions = (version for version in self._versions if version.name == name)
        return next((version for version in versions if version.fingerprint == fingerprint), None)

    def for_request(self, name: str, tokenizer: bytes, fingerprint: bytes, now: float) -> ModelVersion:
        """The version that a request runs on: it has tokens of a `tokenizer`, or of one that is not known (empty).
        `fingerprint` is of the version that computed its tokens, or empty.

        If no worker has the version, the request waits for one. One without tokens waits at the version of an empty
        fingerprint if none of its tokenizer serves.
        """
        found = None if fingerprint else self.serving(name, tokenizer)
        return found or self._find_or_add(name, fingerprint, now)

    def for_worker(self, description: worker_v1.DescribeResponse, address: str, now: float) -> ModelVersion:
        """The version of a worker at this address."""
        for version in self._versions:
            version.lost_at.discard(address)
        self._names.setdefault(description.model)
        return self._find_or_add(description.model, description.fingerprint, now)

    def expire(self, now: float) -> bool:
        """Unlist versions that have been without workers for too long; returns whether there were any."""
        expired = [version for version in self._versions if version.is_listed and self._is_late(version, now)]
        for version in expired:
            version.is_listed = False
        return bool(expired)

    def is_superseded(self, version: ModelVersion) -> bool:
        """Whether a version accepts no requests, while another one of its name does."""
        serving = self.serving(version.name)
        return not version.num_taking and serving not in (None, version) and serving.num_taking > 0

    def replacement(self, version: ModelVersion, tokenizer: bytes) -> ModelVersion | None:
        """The version to which a request without tokens moves from one that is superseded; None: it has to wait."""
        serving = self.serving(version.name, tokenizer)
        return serving if serving is not version and serving is not None and serving.num_taking else None

    def has_tokenizer(self, version: ModelVersion, tokenizer: bytes, *, is_new: bool) -> bool:
        """Whether a version may run token ids of a tokenizer. Protocol 1 does not have the fingerprint.

        A new request may not run either while only versions with other tokenizers serve; one that was accepted waits.
        """
        is_unserved = is_new and not version.fingerprint and self.serving(version.name) is not None
        return not tokenizer or (not is_unserved and version.tokenizer in (b"", tokenizer))

    def is_gone(self, version: ModelVersion, now: float) -> bool:
        """Whether no worker has a version, and none is expected to have it again.

        While another version serves, a version is expected for `worker_timeout`: at the addresses of its lost workers
        or, if it had none in this term, at addresses that are not connected. While none serves, it is expected without
        limit, unless every worker is connected and none has had the name in this term for `worker_timeout`.
        """
        if version.num_workers:
            return False
        never_came = version.description is None
        if self.serving(version.name) in (None, version):
            return never_came and self.all_connected and self._is_late(version, now)
        is_replaced = self.all_connected if never_came else not version.lost_at
        return is_replaced or self._is_late(version, now)

    def discard(self, version: ModelVersion) -> None:
        """Drops a version. Its counters stay in the totals of its name."""
        self._versions.remove(version)
        if version.description is not None:
            self._discarded_totals[version.name] = _add(self._discarded_totals.get(version.name), version.core.totals)

    def discarded_totals(self, name: str) -> Totals:
        """The counters of dropped versions of a name."""
        return self._discarded_totals.get(name, Totals())

    def _find_or_add(self, name: str, fingerprint: bytes, now: float) -> ModelVersion:
        found = self.find(name, fingerprint)
        if found is None:
            found = ModelVersion(name, fingerprint, self._make_core(), now)
            self._versions.append(found)
        return found

    def _is_late(self, version: ModelVersion, now: float) -> bool:
        since = version.without_workers_since
        return since is not None and now - since >= self._worker_timeout


def _add(one: Totals | None, other: Totals) -> Totals:
    if one is None:
        return other
    return Totals(*(a + b for a, b in zip(astuple(one), astuple(other), strict=True)))
