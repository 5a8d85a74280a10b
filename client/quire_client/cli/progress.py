"""The progress of many requests, on stderr."""

from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

_LINE_SECONDS = 60.0


class RequestProgress:
    """A bar on a terminal; elsewhere a line at each tenth of the requests, and at the next request after a minute."""

    def __init__(self, num_requests: int, text: str, num_ended: int = 0) -> None:
        """`text` stands beside the numbers."""
        self._num_requests = num_requests
        self._num_ended = num_ended
        self._text = text
        self._last_line_at = monotonic()
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=num_requests, completed=num_ended, text=text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, text: str) -> None:
        """Replaces the text beside the numbers."""
        self._text = text
        self._progress.update(self._task, text=text)

    def advance(self) -> None:
        """A request has ended."""
        before, self._num_ended = self._num_ended, self._num_ended + 1
        self._progress.advance(self._task)
        is_tenth = self._num_ended * 10 // self._num_requests > before * 10 // self._num_requests
        is_late = monotonic() - self._last_line_at > _LINE_SECONDS
        if not self._console.is_terminal and (is_tenth or is_late):
            self.print_line(f"{self._num_ended:,} of {self._num_requests:,} requests, {self._text}")

    def print_line(self, line: str) -> None:
        """Writes a line; on a terminal above the bar."""
        self._last_line_at = monotonic()
        self._console.print(Text(f"quire: {line}"), soft_wrap=True)
