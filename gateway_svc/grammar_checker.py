"""Makes grammars of constraints and checks them before a request is accepted, in a process beside the gateway."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway_svc.constraint_checks import check_length
from gateway_svc.constraints import ConstraintProblem, UnvalidatedConstraint
from gateway_svc.field_paths import FieldPath
from gateway_svc.grammar_process import receive, request_of, send
from gateway_svc.request_errors import unavailable
from gateway_svc.tenant_threads import TenantThreads
from gateway_svc.turn_constraints import TurnConstraint
from svc_common.errors import QuireError, Reason
from svc_common.keys import DEFAULT_TENANT_NAME

logger = logging.getLogger("quire.gateway")

MAX_CACHED = 256
"""Results that are kept of all tenants together, each of at most MAX_GRAMMAR_BYTES."""

_REASONS = {
    ConstraintProblem.INVALID.value: Reason.GRAMMAR_INVALID,
    ConstraintProblem.TOO_COMPLEX.value: Reason.GRAMMAR_TOO_COMPLEX,
}


class CheckResults:
    """The latest results of checks, by tenant: the time of a check must not show whether another tenant has sent the
    same constraint.

    When there are too many, the tenant with the most loses its oldest one: no tenant can displace what another one
    uses, as long as that one has no more than an equal share.
    """

    def __init__(self) -> None:
        self._of_tenants: dict[str, OrderedDict[bytes, dict[str, Any]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, tenant: str, digest: bytes) -> dict[str, Any] | None:
        """A result, by the digest of its constraint."""
        results = self._of_tenants.get(tenant)
        return None if results is None else results.get(digest)

    def put(self, tenant: str, digest: bytes, result: dict[str, Any]) -> None:
        """Keeps a result as the tenant's latest."""
        results = self._of_tenants.setdefault(tenant, OrderedDict())
        self._count += digest not in results
        results[digest] = result
        results.move_to_end(digest)
        if self._count > MAX_CACHED:
            largest = max(self._of_tenants, key=lambda one: len(self._of_tenants[one]))
            self._of_tenants[largest].popitem(last=False)
            self._count -= 1
            if not self._of_tenants[largest]:
                del self._of_tenants[largest]


class GrammarChecker:
    """The grammars of one model. Its process starts with the first constraint, which takes a second or two."""

    def __init__(self, tokenizer_file: Path, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._eos_token_ids = eos_token_ids
        # The process runs one check at a time. A tenant has one thread, and so at most one check before another's.
        self._threads = TenantThreads(2, "grammars")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._unsupported: str | None = None
        self._is_closed = False
        self._results = CheckResults()

    async def grammar(
        self,
        constraint: UnvalidatedConstraint | TurnConstraint,
        vocab_size: int,
        field_path: FieldPath,
        tenant: str = DEFAULT_TENANT_NAME,
    ) -> str:
        """The grammar of a constraint that can be applied to the model's output. Raises QuireError."""
        # Half a surrogate pair, which JSON can express, was refused before.
        check_length(field_path(constraint.field), sum(len(text.encode()) for text in constraint.texts))
        request = request_of(constraint)
        digest = hashlib.sha256(json.dumps(request).encode()).digest()
        result = self._results.get(tenant, digest)
        if result is None:
            # It may be there by the time that the thread starts.
            result = await self._threads.run(
                tenant, lambda: self._results.get(tenant, digest) or self._ask(request, vocab_size)
            )
        if "unexpected" not in result:  # the next check may have another result
            self._results.put(tenant, digest, result)
        if "grammar" in result:
            grammar: str = result["grammar"]
            return grammar
        which = result["field"] or constraint.field
        raise QuireError(_REASONS[result["problem"]], result["message"], field=field_path(which))

    def close(self) -> None:
        """Ends the process, and with it a check in progress."""
        self._is_closed = True
        self._threads.close()
        if self._process is not None:
            _end(self._process)

    def _ask(self, request: dict[str, Any], vocab_size: int) -> dict[str, Any]:
        """The result of a check, from the process. Raises QuireError."""
        with self._lock:
            process = self._running(vocab_size)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                send(process.stdin, request)
                result: dict[str, Any] = receive(process.stdout)
                if "unexpected" in result:
                    # Without its text, which may have a part of the constraint.
                    logger.error("a constraint could not be checked", extra={"exception": result["unexpected"]})
            except (OSError, EOFError, ValueError):
                self._process = None
                _end(process)
                raise unavailable("the process that checks constraints ended") from None
            if "unavailable" in result:
                raise unavailable(result["unavailable"])
            return result

    def _running(self, vocab_size: int) -> "subprocess.Popen[bytes]":
        if self._unsupported is not None:
            raise QuireError(Reason.FEATURE_UNSUPPORTED, self._unsupported)
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            _end(self._process)
            self._process = None
        arguments = [str(self._tokenizer_file), str(vocab_size), *map(str, self._eos_token_ids)]
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway_svc.grammar_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            # An interrupt from the terminal is the gateway's to handle. In a session of its own Linux might give the
            # process as much of the processors as the gateway has, despite its lower priority.
            process_group=0,
        )
        assert process.stdout is not None
        try:
            self._unsupported = receive(process.stdout)
        except EOFError:
            _end(process)
            raise unavailable("the process that checks constraints did not start") from None
        if self._unsupported is not None:
            _end(process)
            raise QuireError(Reason.FEATURE_UNSUPPORTED, self._unsupported)
        if self._is_closed:
            _end(process)
            raise unavailable("the gateway is shutting down")
        self._process = process
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
