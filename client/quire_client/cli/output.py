"""Output of commands: text that is safe for a terminal, values as JSON, errors as one line."""

import dataclasses
import io
import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire_client.errors import NO_GRPC, TLS_FAILED, UNREACHABLE, QuireError

# A model may generate escape sequences of terminals. Newline and tab stay.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}

_UNFOLDED = 2**16
"""Characters of a line that are not folded."""

ADMIN_UNREACHABLE = "ADMIN_UNREACHABLE"
"""The reason where no scheduler responds at its admin address."""

ADMIN_UNAUTHENTICATED = "ADMIN_UNAUTHENTICATED"
"""The reason where a scheduler requires the deployment's credential."""

NO_ADMIN_SERVICE = "NO_ADMIN_SERVICE"
"""The reason where another service than a scheduler's admin service responds there."""

REQUEST_NOT_LIVE = "REQUEST_NOT_LIVE"
"""The reason where a scheduler has no such request."""

TEXT_TOO_LONG = "TEXT_TOO_LONG"
"""The reason where one of the texts of `quire embed` or `quire classify` is longer than the model's context."""

_NEXT_STEPS = {
    TEXT_TOO_LONG: "shorten the text, or set --truncate-prompt-tokens",
    ADMIN_UNREACHABLE: "by default a scheduler listens for this on its own machine only; name its address with --admin "
    "or QUIRE_ADMIN_ADDRESS",
    ADMIN_UNAUTHENTICATED: "name the file with the deployment's secret with QUIRE_DEPLOYMENT_SECRET_FILE (`make run` "
    "writes deployment.secret in QUIRE_RUN_DIR), or the admin's certificate with QUIRE_MTLS_CERT_FILE",
    NO_ADMIN_SERVICE: "the admin port of a scheduler is 50062 by default; name its address with --admin or "
    "QUIRE_ADMIN_ADDRESS",
    REQUEST_NOT_LIVE: "it may have ended; `quire explain` without an id lists live requests",
    UNREACHABLE: "start a server with `make run`, or name one with --address or QUIRE_ADDRESS",
    NO_GRPC: "a gateway's port for gRPC is 50051 by default; name its address with --address or QUIRE_ADDRESS",
    TLS_FAILED: "connections have TLS where QUIRE_CA_FILE is set, which names the file of the CA",
    "UNIMPLEMENTED": "there is no gateway at this address, or one of an earlier release",
    "UNAUTHENTICATED": "give a key with --api-key or QUIRE_API_KEY",
    "MODEL_NOT_FOUND": "`quire models` lists the served models",
    "CONTEXT_LENGTH_EXCEEDED": "shorten the prompt or lower --max-tokens",
    "DEADLINE_EXCEEDED": "raise --timeout",
    "DEADLINE_TOO_SHORT": "raise --timeout",
    "REQUEST_UNKNOWN": "it ended more than an hour ago, or was never accepted",
    "INTERNAL": "the server's log has details",
}


_ADMIN_REASONS = {
    UNREACHABLE: ADMIN_UNREACHABLE,
    "NOT_FOUND": REQUEST_NOT_LIVE,
    "UNAUTHENTICATED": ADMIN_UNAUTHENTICATED,
    TLS_FAILED: ADMIN_UNAUTHENTICATED,
}


def admin_error(error: QuireError, address: str) -> QuireError:
    """The error of a call to an admin service, with a message for the commands that make such calls."""
    if error.reason in ("UNIMPLEMENTED", NO_GRPC):  # grpc's own status, with a message about methods
        message = f"no admin service of a scheduler at {address}"
        return dataclasses.replace(error, reason=NO_ADMIN_SERVICE, message=message)
    return dataclasses.replace(error, reason=_ADMIN_REASONS.get(error.reason, error.reason))


def write_text(pieces: Iterable[str]) -> None:
    """Writes generated text as it comes, without control characters where a terminal shows it, and ends the line."""
    visible = _CONTROLS if sys.stdout.isatty() else {}
    end = ""
    try:
        for piece in pieces:
            end = "\n"  # also where an error comes after it
            sys.stdout.write(piece.translate(visible))
            sys.stdout.flush()
        end = "\n"
    finally:
        sys.stdout.write(end)
        sys.stdout.flush()


def print_table(table: Table) -> None:
    """Writes a table, folded to the width of a terminal. Elsewhere each row is one line."""
    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    text = io.StringIO()
    Console(markup=False, highlight=False, file=text, width=_UNFOLDED).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Writes values, dataclasses among them, as JSON; bytes become lists of numbers, as in OpenAI's API.

    Without `indent` it is one line. Escapes stand for characters that the encoding of standard output lacks.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # an encoding that lacks a character, or half of a surrogate pair
        text = json.dumps(value, indent=indent, default=_plain)
    print(text, flush=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, bytes):
        return list(value)
    raise TypeError(f"JSON has nothing for a {type(value).__name__}")


def print_resuming(error: QuireError) -> None:
    """Reports on stderr that a call broke and its request is resumed."""
    line = f"quire: {error}; going on"
    # A terminal shows both streams, and the text may be in the middle of a line.
    Console(stderr=True).print(Text("\n" * sys.stdout.isatty() + line), style="dim", soft_wrap=True)


def describe_error(error: QuireError) -> str:
    """Error, field and advice in one line."""
    parts = [str(error)]
    if error.reason in _NEXT_STEPS:
        parts.append(_NEXT_STEPS[error.reason])
    if error.retry_after is not None:
        parts.append(f"try again in {error.retry_after:g} s")
    return "; ".join(parts)
