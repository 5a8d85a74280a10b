"""The progress bar of a call: prompts that are done, and tokens per second."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quire_offline.engine_request import EngineRequest

_INTERVAL = 0.1  # seconds between updates: each takes longer than a token's way through the engine


class ProgressBar:
    """Shows the progress of `num_prompts` prompts on standard error while the block runs.

    `is_shown` None: only on a terminal or in a notebook.
    """

    def __init__(self, num_prompts: int, is_shown: bool | None) -> None:
        console = Console(stderr=True)
        if is_shown is None:
            is_shown = console.is_terminal or console.is_jupyter
        self._progress = Progress(
            TextColumn("prompts"),
            BarColumn(bar_width=12),  # so that a line of 80 characters holds all columns
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[rates]}"),
            console=console,
            disable=not is_shown,
        )
        self._task = self._progress.add_task("prompts", total=num_prompts, rates="")
        self._began = self._shown_at = time.monotonic()
        self._num_done = self._num_prompt_tokens = self._num_tokens = 0
        self._known: dict[EngineRequest, int] = {}  # tokens of requests that have begun

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._show(time.monotonic())
        self._progress.stop()

    def on_progress(self, request: EngineRequest) -> None:
        """A request has more output, or has ended. Called on one thread, for each sequence of each step."""
        if request not in self._known:
            self._num_prompt_tokens += request.num_prompt_tokens
        self._num_tokens += request.num_tokens - self._known.get(request, 0)
        self._known[request] = request.num_tokens
        if request.is_done:
            self._num_done += request.num_prompts
        now = time.monotonic()
        if now - self._shown_at >= _INTERVAL:
            self._show(now)

    def _show(self, now: float) -> None:
        self._shown_at, seconds = now, max(now - self._began, 1e-9)
        rates = f"input {self._num_prompt_tokens / seconds:,.0f}"
        if self._num_tokens:
            rates += f", output {self._num_tokens / seconds:,.0f}"
        rates += " tokens/s"
        self._progress.update(self._task, completed=self._num_done, rates=rates)
