"""The sampled tokens of a step that a device may still compute."""

import contextlib
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from worker_svc.gpu.logprobs import ReportedRows
from worker_svc.gpu.staging import StreamEvent
from worker_svc.sampler import SamplerOutput
from worker_svc.step import TokenLogprobs


class DeviceSampleHandle:
    """The sampled tokens of a step that may still run."""

    def __init__(
        self,
        outputs: Tensor,
        done: StreamEvent,
        num_samples: int,
        reported: ReportedRows,
        scored: Items[ReportedRows] = (),
    ) -> None:
        """`outputs` are the bytes of tokens, their log-probabilities and those of prompts on the host, after `done`."""
        self._outputs, self._done = outputs, done
        self._num_samples, self._reported, self._scored = num_samples, reported, scored

    @property
    def placeholder_tokens(self) -> list[int]:
        """The rows where the next step finds the tokens, as -1 - row."""
        return list(range(-1, -1 - self._num_samples, -1))

    def is_done(self) -> bool:
        """Also true if the device failed; `result` raises then."""
        try:
            return self._done.query()
        except torch.AcceleratorError:
            return True

    def wait(self) -> None:
        with contextlib.suppress(torch.AcceleratorError):
            self._done.synchronize()

    def tokens(self) -> list[int]:
        """The token of each row, -1 for a row without one; waits for them, and raises as `result`."""
        self._done.synchronize()
        sampled: list[int] = self._outputs.numpy()[: 8 * self._num_samples].view(np.int64).tolist()
        return sampled

    def result(self) -> SamplerOutput:
        """Raises torch.AcceleratorError if the device failed."""
        sampled = self.tokens()
        memory = self._outputs.numpy()[8 * self._num_samples :]
        logprobs: list[TokenLogprobs | None] = [None] * self._num_samples
        for row, logprobs_of_row in zip(
            self._reported.rows.tolist(), self._reported.unpack(memory[: self._reported.num_bytes]), strict=True
        ):
            logprobs[row] = logprobs_of_row
        prompt_logprobs, start = [], self._reported.num_bytes
        for rows in self._scored:
            prompt_logprobs.append(rows.unpack(memory[start : start + rows.num_bytes]))
            start += rows.num_bytes
        return SamplerOutput([None if token < 0 else token for token in sampled], logprobs, prompt_logprobs)
