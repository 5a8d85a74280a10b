"""Starts everything on this machine for `quire run`, and stops it when that process ends.

The arguments are flags of `quire serve`, its MODEL, and a prompt. Standard output has two lines of JSON: at once the
prompt, and when everything is ready its addresses. Standard input is open until the other process ends, also where a
signal kills it.
"""

import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from svc_common.model_settings import ModelSettings
from svc_common.model_tasks import ModelTask
from svc_common.supervisor.__main__ import http_urls, run
from svc_common.supervisor.addresses import Addresses
from svc_common.supervisor.console import Console
from svc_common.supervisor.serve import checked_settings, read_arguments, set_variables
from svc_common.supervisor.settings import SupervisorSettings
from svc_common.supervisor.vllm_flags import FlagRefused

LOG_FILE = "server.log"
"""Where lines of the services are, in QUIRE_RUN_DIR: a new file in each run."""


def main() -> None:
    """Exits as the supervisor does, and with 2 where a flag is refused."""
    try:
        line = read_arguments(sys.argv[1:])
        if len(positional := line.positional) > 2:
            raise FlagRefused(f"{positional[2]}: there is one MODEL and one PROMPT; quote a prompt of several words")
        keys = set_variables(line.variables)
        # Streams of other clients end with the chat.
        os.environ.setdefault("QUIRE_DRAIN_GRACE", "0")
        settings = checked_settings(line)
    except FlagRefused as error:
        _refuse(str(error))
    if settings.tls_cert_file is not None and not os.environ.get("QUIRE_CA_FILE"):
        _refuse("QUIRE_TLS_CERT_FILE: the chat needs QUIRE_CA_FILE, the CA of that certificate, to verify it")
    _report(prompt=positional[1] if len(positional) == 2 else None)
    path = settings.run_dir / LOG_FILE
    try:
        log = _open_log(path)
    except BlockingIOError:
        _refuse(f"QUIRE_RUN_DIR: another `quire run` writes {path}; end it, or set QUIRE_RUN_DIR to another directory")
    except OSError as error:
        _refuse(f"QUIRE_RUN_DIR: {path} cannot be written: {error.strerror}")
    watch = threading.Thread(target=_stop_at_end_of_input, daemon=True)
    try:
        run(settings, Console(log, sys.stderr), partial(_announce, path, keys), begin=watch.start)
    finally:
        with suppress(OSError):  # what a full disk had no room for
            log.close()


def _open_log(path: Path) -> TextIO:
    """A new file in place of that of an earlier run. Raises OSError: BlockingIOError where that run still writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError, PermissionError):
        earlier = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(earlier, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(earlier)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # until this process ends, however it ends
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")


def _announce(
    log: Path, keys: Sequence[str], settings: SupervisorSettings, models: Sequence[ModelSettings], addresses: Addresses
) -> None:
    _report(
        model=models[0].names[0],
        generates=models[0].model_task is ModelTask.GENERATE,
        address=",".join(listener.dial_address for listener in addresses.grpc),
        http=", ".join(http_urls(settings, addresses)),
        api_key=keys[0] if keys else None,
        log=str(log),
    )


def _report(**values: Any) -> None:
    with suppress(OSError):  # the other process has ended: so does standard input
        print(json.dumps(values), flush=True)


def _stop_at_end_of_input() -> None:
    # Not by sys.stdin, whose lock a thread that reads would hold at the end of the process.
    while os.read(sys.stdin.fileno(), 2**10):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _refuse(why: str) -> NoReturn:
    print(f"quire run: {why}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
