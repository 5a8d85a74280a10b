"""Steps on a GPU that the host never waits for: everything is enqueued in one stream, and the draws come back by it.

Three things stand at addresses that never change, for graphs are captured once and replayed on other values: what is
staged of a step's inputs, the logits, and the tokens drawn last. Each is read and written in stream order alone, so the
next step may be enqueued while one runs: it finds the tokens of that one in `drawn`, where its batch's stand-ins point.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.executor import run_inline
from worker_svc.gpu.graphs import GraphCapture, Work, capture_sizes, run_without_capture
from worker_svc.gpu.inputs import ForwardInputs, decodes_only, forward_inputs, layout_arrays, padded, token_arrays
from worker_svc.gpu.logprobs import compute_logprobs
from worker_svc.gpu.penalty_slots import PenaltySlots
from worker_svc.gpu.sampling import (
    Arrays,
    LogitEntryLists,
    SamplingInputs,
    adjust_and_sample,
    sampling_columns,
    sampling_inputs,
)
from worker_svc.gpu.staging import ALIGNMENT, Staging, StagingBuffer, StreamEvent
from worker_svc.logprobs import to_token_logprobs
from worker_svc.sampler import SamplerOutput
from worker_svc.sequences import Sequence
from worker_svc.step import TokenLogprobs

# Bias and suppressed tokens of all rows together that are staged. A step with more of them runs without a graph.
_MAX_STAGED_ENTRIES = 1024
# Bytes of a step's inputs: of a token, of a sequence (with its draw), of an entry; and arrays that alignment pads.
_TOKEN_BYTES, _SEQUENCE_BYTES, _ENTRY_BYTES, _NUM_ARRAYS = 24, 96, 12, 24


T = TypeVar("T")


class DeviceForward(Protocol):
    """A model over its own paged cache on the device. For one thread, under `torch.inference_mode`.

    It waits for nothing and allocates what it needs from torch, so that it can be captured.
    """

    def __call__(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        """Enqueue a step: keys and values go into their slots, and what follows the tokens to draw after into `logits`.

        `drawn` int64 [max_sequences] holds the tokens that stand-ins are for; `logits` is float32 [num_samples,
        vocab_size].
        """


@dataclass(frozen=True, slots=True)
class _Launches:
    """A step in two parts: log-probabilities are measured between them."""

    forward: Work
    adjust_and_sample: Work


class DeviceExecutor:
    """An `Executor` of a GPU. On a processor it does the same through Triton's interpreter, for tests.

    Steps in which each sequence decodes run as CUDA graphs, if there are any; all others are enqueued kernel by kernel.
    """

    def __init__(
        self,
        forward: DeviceForward,
        limits: WorkerLimits,
        device: torch.device,
        *,
        cuda_graphs: bool = True,
        report: Callable[[int, int], None] = lambda captured, of: None,
    ) -> None:
        """With `cuda_graphs` all of them are captured here; `report` is told how many are, and of how many.

        All memory that does not depend on a step is taken here too.
        """
        self._forward, self._limits = forward, limits
        max_rows = limits.max_sequences
        max_blocks = -(-limits.context_length // limits.block_size)
        num_input_bytes = (
            limits.max_step_tokens * _TOKEN_BYTES
            + max_rows * (_TOKEN_BYTES + _SEQUENCE_BYTES + 4 * max_blocks)
            + _MAX_STAGED_ENTRIES * _ENTRY_BYTES
            + _NUM_ARRAYS * ALIGNMENT
        )
        self._staging = Staging(num_input_bytes, 8 * max_rows, device)
        self._penalty_slots = PenaltySlots(max_rows, limits.vocab_size, device, self._staging.upload)
        self._entry_lists = LogitEntryLists()
        self._logits = torch.empty((max_rows, limits.vocab_size), dtype=torch.float32, device=device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # What a graph reads block tables from: a step's own are as wide as its longest context needs, graphs' are not.
        self._block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        # Where each of a graph's sequences begins, as each has one token.
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._decodes: dict[int, _Launches] = {}
        self._capture_sizes = capture_sizes(max_rows) if cuda_graphs else []
        if self._capture_sizes:
            self._capture(GraphCapture() if device.type == "cuda" else run_without_capture, report)

    def launch(self, batch: Batch, sequences: Items[Sequence]) -> "DeviceSampleHandle":
        """As `Executor` has it. Waits for nothing but the making of pinned memory, where more is needed than ever."""
        buffer = self._staging.next_buffer()
        entries = _pad_entries(self._entry_lists.of(sequences))
        slots = self._penalty_slots.of(sequences)
        asked = [(row, s.params.logprobs) for row, s in enumerate(sequences) if s.params.logprobs is not None]
        logprob_rows = np.array([row for row, _ in asked], np.int64)
        bucket = self._bucket(batch) if len(entries[0]) == _MAX_STAGED_ENTRIES else None
        if bucket is None:
            columns = sampling_columns(sequences, slots, len(sequences))
            launches, rows = self._lay_out(buffer, batch, columns, entries, logprob_rows)
        else:
            columns = sampling_columns(sequences, slots, bucket)
            launches, rows = self._lay_out_decode(buffer, batch, columns, entries, logprob_rows)

        launches.forward()
        # The model's own logits: the draw changes them.
        raw = self._logits.index_select(0, rows) if asked else None
        launches.adjust_and_sample()
        parts = [self._sampled[: len(sequences)]]
        if raw is not None:
            count = min(max(count for _, count in asked), self._limits.vocab_size)
            parts += compute_logprobs(raw, self._sampled.index_select(0, rows), count)
        return DeviceSampleHandle(self._staging.fetch(buffer, parts), buffer.done, len(sequences), asked)

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """As `Executor` has it: it is done, or enqueued, at once."""
        return run_inline(work)

    def _bucket(self, batch: Batch) -> int | None:
        """The batch size of the graph that computes a batch, if one does."""
        if not self._capture_sizes or not decodes_only(batch):
            return None
        return self._capture_sizes[bisect_left(self._capture_sizes, len(batch.context_lens))]

    def _lay_out(
        self, buffer: StagingBuffer, batch: Batch, columns: Arrays, entries: Arrays, logprob_rows: NDArray[np.int64]
    ) -> tuple[_Launches, Tensor]:
        """What launches any batch, and on the device the rows that want log-probabilities."""
        groups = [token_arrays(batch), columns, [logprob_rows], layout_arrays(batch)]
        if len(entries[0]) == _MAX_STAGED_ENTRIES:
            groups.append(entries)
        tokens, how, (rows,), layout, *staged = self._staging.send(buffer, groups)
        changes = staged[0] if staged else [self._staging.upload(column) for column in entries]
        inputs = forward_inputs(batch, tokens, layout)
        return self._launches(inputs, sampling_inputs(how, changes, self._penalty_slots.token_counts)), rows

    def _lay_out_decode(
        self, buffer: StagingBuffer, batch: Batch, columns: Arrays, entries: Arrays, logprob_rows: NDArray[np.int64]
    ) -> tuple[_Launches, Tensor]:
        """The same for a batch of decodes that a graph computes, of as many rows as the columns have."""
        groups = [*_decode_groups(token_arrays(batch), columns, entries), [logprob_rows], [batch.block_tables]]
        *_, (rows,), (tables,) = self._staging.send(buffer, groups)
        self._block_tables[: len(tables), : tables.shape[1]].copy_(tables)
        return self._decodes[len(columns[0])], rows

    def _launches(self, inputs: ForwardInputs, how: SamplingInputs) -> _Launches:
        num_rows = len(how.sampling.seeds)
        logits, sampled = self._logits[:num_rows], self._sampled[:num_rows]
        return _Launches(
            lambda: self._forward(inputs, self._sampled, logits),
            lambda: adjust_and_sample(logits, how, sampled),
        )

    @torch.inference_mode()
    def _capture(self, capture: Callable[[Work], Work], report: Callable[[int, int], None]) -> None:
        """Capture what would be launched for each batch size; the largest first, whose memory serves the others.

        What is captured reads the very places that `_lay_out_decode` fills for as many rows. Nothing is in them now.
        """
        for place, bucket in enumerate(reversed(self._capture_sizes), start=1):
            buffer = self._staging.next_buffer()
            nothing = [np.empty(0, dtype) for dtype in (np.int64, np.int64, np.int64, np.int32)]
            columns = sampling_columns([], np.empty(0, np.int64), bucket)
            groups = _decode_groups(nothing, columns, _pad_entries(self._entry_lists.of([])))
            (token_ids, positions, slots, context_lens), how, changes = self._staging.send(buffer, groups)
            self._staging.fetch(buffer, [self._sampled[:bucket]])
            inputs = ForwardInputs(
                token_ids,
                positions,
                slots,
                self._block_tables[:bucket],
                query_starts=self._query_starts[: bucket + 1],
                context_lens=context_lens,
                logits_indices=None,
                num_single=bucket,
                max_query_len=1,
            )
            launches = self._launches(inputs, sampling_inputs(how, changes, self._penalty_slots.token_counts))
            self._decodes[bucket] = _Launches(capture(launches.forward), capture(launches.adjust_and_sample))
            report(place, len(self._capture_sizes))


class DeviceSampleHandle:
    """The draws of a step that may still run."""

    def __init__(self, outputs: Tensor, done: StreamEvent, num_samples: int, asked: list[tuple[int, int]]) -> None:
        """`outputs` are the bytes of tokens and log-probabilities on the host, once `done`.

        `asked` are the rows that want log-probabilities, with how many of the likeliest.
        """
        self._outputs, self._done = outputs, done
        self._num_samples, self._asked = num_samples, asked

    @property
    def placeholder_tokens(self) -> list[int]:
        """Where the next step finds each token: -1 - row."""
        return list(range(-1, -1 - self._num_samples, -1))

    def is_done(self) -> bool:
        """Whether the device is done; also where it failed, which `result` raises."""
        try:
            return self._done.query()
        except torch.AcceleratorError:
            return True

    def wait(self) -> None:
        """Sleep until the device is done."""
        with contextlib.suppress(torch.AcceleratorError):
            self._done.synchronize()

    def result(self) -> SamplerOutput:
        """What was drawn. Raises torch.AcceleratorError where the device failed."""
        self._done.synchronize()
        memory = self._outputs.numpy()
        sampled = memory[: 8 * self._num_samples].view(np.int64).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * self._num_samples
        for (row, _), logprobs_of_row in zip(
            self._asked, self._unpack_logprobs(memory[8 * self._num_samples :]), strict=True
        ):
            logprobs[row] = logprobs_of_row
        return SamplerOutput([None if token < 0 else token for token in sampled], logprobs)

    def _unpack_logprobs(self, memory: NDArray[np.uint8]) -> list[TokenLogprobs]:
        if not self._asked:
            return []
        # float32 [asked, 1 + count], then int32 [asked, count]
        count = (len(memory) // (4 * len(self._asked)) - 1) // 2
        end = 4 * len(self._asked) * (1 + count)
        values = memory[:end].view(np.float32).reshape(len(self._asked), 1 + count)
        ids = memory[end:].view(np.int32).reshape(len(self._asked), count)
        return to_token_logprobs(values, ids, [count for _, count in self._asked])


def _decode_groups(tokens: Arrays, columns: Arrays, entries: Arrays) -> list[Arrays]:
    """What graphs read, filled up to as many rows as the columns have.

    A row that only fills up is stored nowhere and has no context.
    """
    bucket = len(columns[0])
    return [[padded(array, bucket, fill) for array, fill in zip(tokens, (0, 0, -1, 0), strict=True)], columns, entries]


def _pad_entries(entries: Arrays) -> Arrays:
    """Columns of `LogitEntries` filled up to a multiple of _ENTRY_ROOM, and to that at least.

    Kernels are compiled anew for some lengths, which must not happen while serving.
    """
    length = max(1, -(-len(entries[0]) // _MAX_STAGED_ENTRIES)) * _MAX_STAGED_ENTRIES
    return [padded(column, length, fill) for column, fill in zip(entries, (-1, 0, 0), strict=True)]
