"""The input of a batch: checked as a whole before anything is sent, then read again, request by request."""

import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from quire_client.batch.lines import DIGEST_BYTES, BatchError, BatchLine, read_line
from quire_client.batch.sending_order import SendingOrder

STDIN = "-"

# A server takes messages of 16 MiB in UTF-8. Escapes of JSON may need several times as much.
_MAX_LINE_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"
_NO_DIGEST = bytes(DIGEST_BYTES)  # of a blank line


class BatchInput:
    """Lines of a file. Of each line 32 bytes are kept, and 40 more while they are checked; bodies are not kept."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        """Reads the file, which can be read several times, to its end. Raises BatchError."""
        self.name = name
        self.num_requests = 0
        self.first_line_of_url: dict[str, int] = {}
        """Each url of the input, with the number of the first line that has it."""
        self.ignored_fields: dict[str, None] = {}
        """Names of fields without effect, in the order in which they were found."""
        self._file = file
        self._digests = bytearray()
        self._hashes = array("q")
        self._offsets = array("q")
        """Where each line begins."""
        self._numbers = array("q")
        """The numbers of the requests' lines, as they are sent."""
        self._check()

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the file."""
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino

    @property
    def num_lines(self) -> int:
        """With blank ones."""
        return len(self._digests) // DIGEST_BYTES

    def digest(self, number: int) -> bytes | None:
        """The digest of the request on a line, from 1. None: there is no such line, or it is blank."""
        found = bytes(self._digests[(number - 1) * DIGEST_BYTES : number * DIGEST_BYTES])
        return found if number > 0 and found not in (b"", _NO_DIGEST) else None

    def requests(self, is_done: Callable[[int], bool]) -> Iterator[BatchLine]:
        """The requests on lines whose number is not done, those whose bodies begin alike one after another.

        Raises BatchError where the file has changed.
        """
        for number in self._numbers:
            if not is_done(number):
                yield self._read_again(number)

    def _read_again(self, number: int) -> BatchLine:
        try:
            self._file.seek(self._offsets[number - 1])
            line: BatchLine | None = read_line(self._read_line(number), number)
        except OSError as error:
            raise _unreadable(self.name, error) from error
        except BatchError:
            line = None  # it was valid when it was checked
        if line is None or line.digest != self.digest(number):
            raise BatchError(f"{self.name}: line {number}: has changed since the batch started")
        return line

    def _check(self) -> None:
        order = SendingOrder()
        numbers = array("q")
        offset = 0
        for number, data in self._read():
            self._offsets.append(offset)
            offset = self._file.tell()
            if not data.strip():
                self._digests += _NO_DIGEST
                continue
            line = self._parse(number, data)
            self.num_requests += 1
            self.first_line_of_url.setdefault(line.url, number)
            self.ignored_fields.update(dict.fromkeys(line.ignored_fields))
            self._digests += line.digest
            self._hashes.append(hash(line.custom_id))
            numbers.append(number)
            order.add(line.body)
        if not self.num_requests:
            raise BatchError(f"{self.name}: has no requests")
        self._check_ids()
        self._numbers = array("q", (numbers[place] for place in order.places()))

    def _check_ids(self) -> None:
        """Raises BatchError where two lines have one custom_id. Only ids with equal hashes are compared."""
        repeated = {low for low, high in pairwise(sorted(self._hashes)) if low == high}
        self._hashes = array("q")
        if not repeated:
            return
        first_numbers: dict[str, int] = {}
        for number, data in self._read():
            if self.digest(number) is None:
                continue
            custom_id = self._parse(number, data).custom_id
            if hash(custom_id) in repeated and first_numbers.setdefault(custom_id, number) != number:
                raise BatchError(
                    f"{self.name}: line {number}: custom_id: {custom_id!r} is also that of line "
                    f"{first_numbers[custom_id]}"
                )

    def _parse(self, number: int, data: bytes) -> BatchLine:
        try:
            return read_line(data, number)
        except BatchError as error:
            raise BatchError(f"{self.name}: {error}") from None

    def _read(self) -> Iterator[tuple[int, bytes]]:
        """All lines by their numbers."""
        try:
            self._file.seek(0)
            number = 0
            while data := self._read_line(number + 1):
                number += 1
                yield number, data
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def _read_line(self, number: int) -> bytes:
        """The line at which the file is, which has this number; empty at the end. Raises BatchError and OSError."""
        data = self._file.readline(_MAX_LINE_BYTES + 1)
        if len(data) > _MAX_LINE_BYTES:
            raise BatchError(f"{self.name}: line {number}: has more than {_MAX_LINE_BYTES // 2**20} MiB")
        return data.removeprefix(_BOM) if number == 1 else data


@contextmanager
def open_input(path: str) -> Iterator[BatchInput]:
    """The requests of a file, or of standard input for `-`. Raises BatchError."""
    with ExitStack() as stack:
        name = "standard input" if path == STDIN else path
        try:
            source = sys.stdin.buffer if path == STDIN else stack.enter_context(Path(path).open("rb"))
            if path == STDIN or not source.seekable():  # the input is read twice
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(source, copy)
                source = copy
        except OSError as error:
            raise _unreadable(name, error) from error
        yield BatchInput(name, source)


def _unreadable(name: str, error: OSError) -> BatchError:
    return BatchError(f"{name}: {(error.strerror or 'cannot be read').lower()}")
