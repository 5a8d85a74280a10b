"""Vectors of another implementation of the embedding model. Copied beside the tests of each suite."""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any, Self


class Reference:
    """A process that computes the vectors of texts, from the first call on.

    QUIRE_REFERENCE is its command, a list in JSON. It prints a line when it is ready, and reads and answers lines of
    JSON. It ends with its standard input.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:  # closes its pipes, and waits
                self._process.terminate()

    def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """The vector of each text. Raises RuntimeError if the process has ended."""
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps({"batches": [list(texts)]}) + "\n")
        process.stdin.flush()
        vectors: list[list[float]] = _read(process)["vectors"]
        return vectors

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            command = json.loads(os.environ["QUIRE_REFERENCE"])
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            _read(self._process)
        return self._process


def _read(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the reference has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer
