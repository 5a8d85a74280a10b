"""The output of a batch: which lines of the input it answers, and lines appended to it."""

import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from quire_client.batch.input import BatchInput
from quire_client.batch.lines import DIGEST_BYTES, ID_PREFIX, BatchError, BatchLine, LineAnswer

_START = b'{"id": "' + ID_PREFIX.encode()
_CUT_OFF = re.compile(re.escape(_START) + rb"([1-9][0-9]{0,18})(?:_(.*))?", re.DOTALL)
"""Number and rest of a line that ends anywhere after the first digit of its number."""


class BatchOutput:
    """A file with one line for each request that is answered. One process at a time has it.

    The `id` of its lines is the number of a line of the input, with the digest of what that line has. So the file alone
    says which requests are answered, and to which input it belongs.

    `run` is random, part of the names of all requests, and kept in a file beside the output until the batch is
    complete. With it, a client that starts again gets answers that the server has already; and another batch of the
    same requests gets answers of its own.
    """

    def __init__(self, path: Path, file: int, batch: BatchInput, *, is_new: bool) -> None:
        """Reads what is there, and removes a last line that was cut off. Raises BatchError."""
        self.path = path
        self.num_answered = 0
        """Lines, with those of errors."""
        self.num_errors = 0
        self._file = file
        self._batch = batch
        self._is_answered = bytearray(batch.num_lines + 1)
        self._is_broken = False  # after a write that failed: the file may end with a part of a line
        self._run_path = path.with_name(f"{path.name}.run")
        self._is_new = is_new
        self._recover()
        self.run = self._read_run(is_new)

    def has(self, number: int) -> bool:
        """Whether a line of the input is answered."""
        return bool(self._is_answered[number])

    def append(self, line: BatchLine, answer: LineAnswer) -> None:
        """Writes an answer. Raises BatchError; after that, no other answer is written."""
        if self._is_broken:
            raise BatchError(f"{self.path}: an earlier answer could not be written")
        data = answer.output_line(line)
        try:
            size = os.fstat(self._file).st_size
            self._write(data, size)
        except OSError as error:
            self._is_broken = True
            raise _failed(self.path, error) from error
        self._count(line.number, answer.is_error)

    def _write(self, data: bytes, size: int) -> None:
        """Writes at the end of the file, which has `size` bytes, or not at all."""
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise

    def finish(self) -> None:
        """The batch is complete: removes the file beside the output. Raises BatchError where the disk has failed."""
        try:
            os.fsync(self._file)
            self._run_path.unlink(missing_ok=True)
        except OSError as error:
            raise _failed(self.path, error) from error

    def discard(self) -> None:
        """Nothing was sent: removes a file that is new, and the one beside it."""
        if self._is_new and not self.num_answered:
            with suppress(OSError):
                self._run_path.unlink(missing_ok=True)
                self.path.unlink()

    def _recover(self) -> None:
        size = 0
        with open(os.dup(self._file), "rb") as reader:
            reader.seek(0)
            for place, data in enumerate(reader, start=1):
                if not data.endswith(b"\n"):
                    if not self._is_cut_off(data):
                        raise self._foreign(place)
                    os.ftruncate(self._file, size)
                    return
                number, is_error = self._read_line(place, data)
                self._count(number, is_error)
                size += len(data)

    def _is_cut_off(self, data: bytes) -> bool:
        """Whether data is the beginning of an answer to a line of this input."""
        match = _CUT_OFF.fullmatch(data)
        if match is None:
            return _START.startswith(data)
        number, rest = int(match[1]), match[2]
        if rest is None:
            return number <= self._batch.num_lines
        digest = self._batch.digest(number)
        expected = b"" if digest is None else digest.hex().encode() + b'"'
        return digest is not None and (expected.startswith(rest) or rest.startswith(expected))

    def _read_line(self, place: int, data: bytes) -> tuple[int, bool]:
        """The number of the input's line that a line of the output answers, and whether it has an error."""
        try:
            fields = json.loads(data)
            number, digest = _read_id(fields["id"])
            response = fields["response"]
            is_error = fields["error"] is not None or not (200 <= response["status_code"] < 300)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._foreign(place) from None
        if self._batch.digest(number) != digest:
            raise self._foreign(place)
        if self.has(number):
            raise BatchError(f"{self.path}: line {place}: is a second answer to line {number} of {self._batch.name}")
        return number, is_error

    def _count(self, number: int, is_error: bool) -> None:
        self._is_answered[number] = True
        self.num_answered += 1
        self.num_errors += is_error

    def _foreign(self, place: int) -> BatchError:
        return BatchError(
            f"{self.path}: line {place}: answers no line of {self._batch.name} as it is now; name another file with "
            "--output, or remove this one"
        )

    def _read_run(self, is_new: bool) -> str:
        with suppress(OSError):
            run = self._run_path.read_text().strip()
            if not is_new and run.isalnum() and run.isascii() and len(run) <= 32:
                return run
        run = secrets.token_hex(8)
        written = self._run_path.with_name(f"{self._run_path.name}.new")
        try:
            written.write_text(f"{run}\n")
            written.replace(self._run_path)  # at once: a client that is killed leaves it whole or not at all
        except OSError as error:
            raise _failed(self._run_path, error) from error
        return run


@contextmanager
def open_output(path: Path, batch: BatchInput) -> Iterator[BatchOutput]:
    """The output at `path`, new or continued. Raises BatchError where it belongs to another input or is in use."""
    with ExitStack() as stack:
        try:
            file, is_new = _open(path)
            stack.callback(os.close, file)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise BatchError(f"{path}: is not a file that a batch can continue")
            if (found.st_dev, found.st_ino) == batch.identity:
                raise BatchError(f"{path}: is the input; name another file with --output")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system removes it with the process
            output = BatchOutput(path, file, batch, is_new=is_new)
        except BlockingIOError:
            raise BatchError(f"{path}: another `quire batch` is writing it") from None
        except OSError as error:
            raise _failed(path, error) from error
        yield output


def _open(path: Path) -> tuple[int, bool]:
    """The file, and whether it is new."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags | os.O_NONBLOCK), False  # a FIFO has perhaps no reader


def _read_id(text: Any) -> tuple[int, bytes]:
    """Raises ValueError or AttributeError where it is no id of a batch."""
    number, _, digest = text.removeprefix(ID_PREFIX).partition("_")
    if not text.startswith(ID_PREFIX) or not number.isdecimal() or len(digest) != 2 * DIGEST_BYTES:
        raise ValueError
    return int(number), bytes.fromhex(digest)


def _failed(path: Path, error: OSError) -> BatchError:
    return BatchError(f"{path}: {(error.strerror or 'cannot be written').lower()}")
