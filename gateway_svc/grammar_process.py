"""The process in which a gateway makes and compiles grammars: `python -m gateway_svc.grammar_process FILE SIZE EOS...`.

Time and memory that a grammar takes are not bounded by its size nor by llguidance's limits, and some end the process.
So each check runs in a fork, with limits of time and memory. Requests and responses are frames on standard input and
output, one at a time.
"""

import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gateway_svc.constraints import ConstraintError, ConstraintProblem, UnvalidatedConstraint, checked_grammar
from gateway_svc.field_paths import Field
from gateway_svc.message_formats.grammar import CallRule, ReasoningRule
from gateway_svc.schema_places import with_place
from gateway_svc.turn_constraints import CheckedTool, TurnConstraint, checked_turn_grammar
from svc_common.gc_tuning import return_free_memory
from svc_common.grammars import UnsupportedTokenizer, grammar_threads, load_grammar_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CHECK_SECONDS = 0.5
"""Processor time of one check. A usual schema takes a millisecond; large ones of practice take 20 ms."""
CHECK_DEADLINE_SECONDS = 10.0
"""Of real time, until a check without a result is ended: one that waits uses no processor time."""
CHECK_BYTES = 512 * 2**20
"""Address space of a check beyond that of the process. About 192 MiB of it are the stack and what the C library
reserves for a thread; they take no memory until they are used."""

_OUT_OF_MEMORY = 2  # the exit of a check for which a limit left Python no memory
_EXITS_BY_LIMITS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, _OUT_OF_MEMORY)
"""How a check ends that exceeds a limit: by its processor time; where llguidance gets no memory, which aborts then; at
the end of its stack; where Python gets no memory. Other ends say nothing of the constraint, such as SIGKILL, by which
Linux ends a process when memory runs out.
"""
_NICENESS = 5
_EXHAUSTED = ConstraintError("takes too long, or too much memory, to check", ConstraintProblem.TOO_COMPLEX)
_LENGTH = struct.Struct(">I")


def send(stream: IO[bytes], message: Any) -> None:
    """Writes one frame."""
    data = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Reads one frame. Raises EOFError at the end of the stream."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return json.loads(_exactly(stream, length))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main(arguments: Sequence[str]) -> None:
    """Serves checks until standard input ends. The first frame is null, or why the tokenizer cannot be used."""
    path, vocab_size, *eos_token_ids = arguments
    os.nice(_NICENESS)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    try:
        tokenizer = load_grammar_tokenizer(Path(path).read_text(), [int(one) for one in eos_token_ids], int(vocab_size))
    except (OSError, UnsupportedTokenizer) as error:
        send(target, str(error))
        return
    _warm_up(tokenizer)
    send(target, None)
    while True:
        try:
            request = receive(source)
        except EOFError:
            return
        send(target, _check_in_fork(request, tokenizer))


def _warm_up(tokenizer: "LLTokenizer") -> None:
    """Does once what each fork would do, and leaves memory as forks can share it."""
    with grammar_threads(1, "warm-up") as threads:
        threads.submit(checked_grammar, UnvalidatedConstraint(Field.JSON_OBJECT), tokenizer).result()
    gc.collect()
    gc.freeze()
    return_free_memory()


def _check_in_fork(request: dict[str, Any], tokenizer: "LLTokenizer") -> dict[str, Any]:
    """The result of a check, or with `unavailable` why there is none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            _limit()
            with os.fdopen(writer, "wb") as answer:
                for result in _check(request, tokenizer):
                    answer.write(json.dumps(result).encode() + b"\n")
                    answer.flush()
            os._exit(0)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        finally:
            os._exit(1)
    os.close(writer)
    data = _read_until(reader, time.monotonic() + CHECK_DEADLINE_SECONDS)
    if data is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if data is None:
        return {"unavailable": "the check of the constraint took too long"}
    *lines, _ = data.split(b"\n")
    if lines:
        response: dict[str, Any] = json.loads(lines[-1])
        return response
    if os.waitstatus_to_exitcode(status) in _EXITS_BY_LIMITS:
        return _refusal(_EXHAUSTED)
    return {"unavailable": "the check of the constraint was ended"}


def _read_until(reader: int, deadline: float) -> bytes | None:
    """All that is written to a pipe, which is closed then; None if it does not end before the deadline."""
    data = bytearray()
    with os.fdopen(reader, "rb", buffering=0) as answer:
        while select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = answer.read(2**16)
            if not chunk:
                return bytes(data)
            data += chunk
    return None


def _limit() -> None:
    """Sets the limits of a check on this process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a runtime writes as it aborts
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process ends and not the gateway
    signal.setitimer(signal.ITIMER_PROF, CHECK_SECONDS)  # SIGPROF ends the process
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _check(request: dict[str, Any], tokenizer: "LLTokenizer") -> Iterator[dict[str, Any]]:
    """The result, and a better one if there is: the limits may end the process while the place of an error is found."""
    # A thread, for its stack.
    threads = grammar_threads(1, "check")
    try:
        if "tools" in request:
            yield {"grammar": threads.submit(checked_turn_grammar, _turn(request), tokenizer).result()}
        else:
            yield {"grammar": threads.submit(checked_grammar, _constraint(request), tokenizer).result()}
    except ConstraintError as error:
        yield _refusal(error)
        if error.schema is not None:
            with suppress(BaseException):  # a panic of llguidance is no Exception
                yield _refusal(threads.submit(with_place, error, tokenizer).result())
    except MemoryError:
        yield _refusal(_EXHAUSTED)
    except BaseException as error:
        yield _refusal(ConstraintError("cannot be checked")) | {"unexpected": type(error).__name__}


def _constraint(request: dict[str, Any]) -> UnvalidatedConstraint:
    return UnvalidatedConstraint(**{**request, "field": Field(request["field"]), "choices": tuple(request["choices"])})


def _turn(request: dict[str, Any]) -> TurnConstraint:
    answer = request["answer"]
    return TurnConstraint(
        **{
            **request,
            "field": Field(request["field"]),
            "tools": tuple(map(_checked_tool, request["tools"])),
            "calls": CallRule(request["calls"]),
            "reasoning": ReasoningRule(request["reasoning"]),
            "answer": None if answer is None else _constraint(answer),
        }
    )


def _checked_tool(tool: dict[str, Any]) -> CheckedTool:
    given = tool["input"]
    return CheckedTool(tool["name"], tool["parameters"], None if given is None else _constraint(given))


def _refusal(error: ConstraintError) -> dict[str, Any]:
    return {"problem": error.problem.value, "message": str(error), "field": error.field}


def request_of(constraint: UnvalidatedConstraint | TurnConstraint) -> dict[str, Any]:
    """The request for a check."""
    request = asdict(constraint)
    if isinstance(constraint, TurnConstraint):
        request |= {"calls": constraint.calls.value, "reasoning": constraint.reasoning.value}
    return request


if __name__ == "__main__":
    main(sys.argv[1:])
