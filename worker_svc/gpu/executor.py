"""Steps on a GPU that the host never waits for: all work is enqueued in one stream, and so are the copies of sampled
tokens.

Three things have fixed addresses, because graphs are captured once and replayed with other values: staged inputs of a
step, the logits, and the tokens sampled last. Each is read and written in stream order only. So the next step may be
enqueued while one runs: its placeholders refer to that step's tokens in `sampled`.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.mask_logits import mask_logits
from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.executor import SampleHandle, run_inline
from worker_svc.gpu.device_attention import DeviceAttention
from worker_svc.gpu.graphs import GraphCapture, Work, capture_sizes, run_without_capture
from worker_svc.gpu.inputs import (
    ForwardInputs,
    decodes_only,
    empty_batch,
    forward_inputs,
    layout_arrays,
    padded,
    token_arrays,
)
from worker_svc.gpu.logprobs import ReportedRows
from worker_svc.gpu.matchers import SequenceMatchers
from worker_svc.gpu.penalty_slots import PenaltySlots, has_penalties
from worker_svc.gpu.sampling import (
    Arrays,
    BadWordColumns,
    DeviceBadWords,
    DeviceMasks,
    LogitEntryLists,
    SamplingInputs,
    adjust_and_sample,
    bad_word_columns,
    sampling_columns,
    sampling_inputs,
)
from worker_svc.gpu.staging import ALIGNMENT, Staging, StagingBuffer, StreamEvent
from worker_svc.out_of_memory import Drafts, StepWork, launch_within_memory
from worker_svc.prompt_logprobs import PromptPiece
from worker_svc.sampler import SamplerOutput
from worker_svc.sequences import Sequence
from worker_svc.step import SamplingParams, TokenLogprobs

# Staged entries of bias and suppressed tokens, of all rows. A step with more of them runs without a graph.
_MAX_STAGED_ENTRIES = 1024
# Bytes of a step's inputs: per token, per sequence (with its sampling), per entry; and arrays padded for alignment.
_TOKEN_BYTES, _SEQUENCE_BYTES, _ENTRY_BYTES, _NUM_ARRAYS = 24, 96, 12, 24


T = TypeVar("T")


class DeviceForward(Protocol):
    """A model over its own paged cache on the device. For one thread, under `torch.inference_mode`.

    It waits for nothing and allocates with torch, so that it can be captured.
    """

    @property
    def attention(self) -> DeviceAttention:
        """What plans each step."""

    def __call__(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        """Enqueues a step: stores keys and values in their slots, writes the logits of the sampled rows to `logits`.

        `sampled` int64 [rows] holds the tokens that placeholders refer to; `logits` is float32 [num_rows, vocab_size].
        """


@dataclass(frozen=True, slots=True)
class _Launches:
    """A step in two parts: log-probabilities are computed between them.

    With masks the second part never runs as a graph.
    """

    forward: Work
    adjust_and_sample: Work
    sample_masked: Callable[[DeviceMasks], None]


class DeviceExecutor:
    """An `Executor` of a GPU. On a CPU it does the same through Triton's interpreter, for tests.

    Steps in which each sequence decodes run as CUDA graphs, if graphs are enabled; all others are enqueued kernel by
    kernel.
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
        """With `cuda_graphs` all graphs are captured here; `report` receives how many are done, and of how many.

        All memory that does not depend on a step is allocated here too.
        """
        self._forward, self._limits, self._device = forward, limits, device
        self._has_sampled = False  # in the step that was launched last
        max_sequences, max_rows = limits.max_sequences, limits.max_sampled_rows
        max_logits = max(max_rows, limits.max_scored_rows)
        max_blocks = -(-limits.context_length // limits.block_size)
        num_input_bytes = (
            limits.max_step_tokens * _TOKEN_BYTES
            + max_sequences * (_TOKEN_BYTES + 4 * max_blocks)
            + max_rows * _SEQUENCE_BYTES
            + _MAX_STAGED_ENTRIES * _ENTRY_BYTES
            + _NUM_ARRAYS * ALIGNMENT
            + forward.attention.num_plan_bytes(max_sequences)
        )
        self._staging = Staging(num_input_bytes, 8 * max_rows, device)
        self._penalty_slots = PenaltySlots(max_sequences, limits.vocab_size, device, self._staging.upload)
        self._entry_lists = LogitEntryLists()
        self._logits = torch.empty((max_logits, limits.vocab_size), dtype=torch.float32, device=device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # Graphs read block tables from here, at full width; a step's own are as wide as its longest context.
        self._block_tables = torch.zeros((max_sequences, max_blocks), dtype=torch.int32, device=device)
        # The start of each of a graph's sequences; each has one token.
        self._query_starts = torch.arange(max_sequences + 1, dtype=torch.int32, device=device)
        self._decodes: dict[int, _Launches] = {}
        self._matchers = SequenceMatchers()
        # Compiled now. It changes nothing: every token is allowed.
        every = np.full((1, -(-limits.vocab_size // 32)), -1, np.int32)
        mask_logits(self._logits, self._staging.upload(np.zeros(1, np.int64)), self._staging.upload(every))
        sizes = capture_sizes(max_sequences)
        self._capture_sizes = sizes if cuda_graphs else []
        if cuda_graphs:
            self._capture(sizes, GraphCapture() if device.type == "cuda" else run_without_capture, report)
        elif device.type != "cpu":
            # Compiled now, because the kernels of a decode depend on its batch size; the interpreter compiles nothing.
            self._capture(sizes, run_without_capture, lambda captured, of: None)

    def launch(
        self, batch: Batch, sequences: Items[Sequence], drafts: Drafts = (), pieces: Items[PromptPiece] = ()
    ) -> SampleHandle:
        """Waits for nothing except for pinned memory, if more is needed than ever before; and, while the forward pass
        runs, for the tokens of the step before if a sequence has a grammar.
        """
        return launch_within_memory(self._launch, StepWork(batch, sequences, drafts, pieces), self._recover)

    def _recover(self) -> bool:
        """After memory ran out: frees what torch keeps. Whether the step can be launched again."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        # Sampling overwrites the tokens that the step's placeholders refer to.
        return not self._has_sampled

    def _launch(self, work: StepWork[Sequence]) -> "DeviceSampleHandle":
        self._has_sampled = False
        with self._staging.next_buffer() as buffer:
            outputs, num_samples, reported, scored = self._enqueue(buffer, work)
        handle = DeviceSampleHandle(outputs, buffer.done, num_samples, reported, scored)
        self._matchers.launched(handle)
        return handle

    def _enqueue(
        self, buffer: StagingBuffer, work: StepWork[Sequence]
    ) -> tuple[Tensor, int, ReportedRows, list[ReportedRows]]:
        """Enqueues a step. Returns what its handle needs: outputs, sampled rows, and rows with log-probabilities."""
        batch, sequences, drafts, pieces = work
        positions = [len(sequence.tokens) for sequence in sequences]
        constrained = any(sequence.matcher is not None for sequence in sequences)
        whole = sequences
        if drafts:
            lengths = [1 + len(draft) for draft in drafts]
            positions = [first + row for first, length in zip(positions, lengths, strict=True) for row in range(length)]
            sequences = [s for s, length in zip(sequences, lengths, strict=True) for _ in range(length)]
        entries = _pad_entries(self._entry_lists.of(sequences, positions))
        slots = self._penalty_slots.of(sequences)
        reported = ReportedRows.of([sequence.params for sequence in sequences], self._limits.vocab_size)
        logprob_rows = reported.rows
        filtered = [(row, s.params) for row, s in enumerate(sequences) if s.has_filters]
        bad_words = bad_word_columns(whole, drafts)
        # Logit filters and bad words are not part of a graph.
        is_capturable = len(entries[0]) == _MAX_STAGED_ENTRIES and not filtered and bad_words is None
        bucket = self._bucket(batch) if is_capturable else None
        scored = [self._score(piece) for piece in pieces]
        if bucket is None:
            columns = sampling_columns(sequences, positions, slots, len(sequences))
            launches, rows = self._lay_out(buffer, batch, columns, entries, logprob_rows, filtered, bad_words)
        else:
            columns = sampling_columns(sequences, positions, slots, bucket)
            launches, rows = self._lay_out_decode(buffer, batch, columns, entries, logprob_rows)

        launches.forward()
        self._has_sampled = True
        # Before sampling, which changes the logits.
        raw = self._logits.index_select(0, rows) if len(logprob_rows) else None
        if constrained:
            # The device computes the forward pass while the host makes the masks.
            masks = self._matchers.masks(whole, drafts)
            launches.sample_masked(DeviceMasks(self._staging.upload(masks.rows), self._staging.upload(masks.bits)))
        else:
            launches.adjust_and_sample()
        parts = [self._sampled[: len(sequences)]]
        if raw is not None:
            parts += reported.compute(raw, self._sampled.index_select(0, rows), self._staging.upload)
        for _, values_and_ids in scored:
            parts += values_and_ids
        outputs = self._staging.fetch(buffer, parts)
        return outputs, len(sequences), reported, [rows for rows, _ in scored]

    def can_verify(self, params: SamplingParams) -> bool:
        """Not with penalties: the rows of a step do not see each other's tokens."""
        return not has_penalties(params)

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """It is done, or enqueued, at once."""
        return run_inline(work)

    def _score(self, piece: PromptPiece) -> tuple[ReportedRows, list[Tensor]]:
        """Enqueues a piece of a prompt. The logits are overwritten by the next piece, or by the batch."""
        upload, num_rows = self._staging.upload, len(piece.next_tokens)
        arrays = (token_arrays(piece.batch), layout_arrays(piece.batch), self._plan(piece.batch))
        tokens, layout, plan = (list(map(upload, group)) for group in arrays)
        logits = self._logits[:num_rows]
        self._forward(forward_inputs(piece.batch, tokens, layout, plan), self._sampled, logits)
        reported = ReportedRows(range(num_rows), [piece.num_top] * num_rows, [()] * num_rows, self._limits.vocab_size)
        return reported, reported.compute(logits, upload(piece.next_tokens), upload)

    def _plan(self, batch: Batch) -> Arrays:
        return self._forward.attention.plan(batch, len(batch.context_lens))

    def _bucket(self, batch: Batch) -> int | None:
        """The batch size of the graph for a batch, or None."""
        if not self._capture_sizes or not decodes_only(batch):
            return None
        return self._capture_sizes[bisect_left(self._capture_sizes, len(batch.context_lens))]

    def _lay_out(
        self,
        buffer: StagingBuffer,
        batch: Batch,
        columns: Arrays,
        entries: Arrays,
        logprob_rows: NDArray[np.int64],
        filtered: Items[tuple[int, SamplingParams]],
        bad_words: BadWordColumns | None,
    ) -> tuple[_Launches, Tensor]:
        """The launches of any batch, and on the device the rows that request log-probabilities."""
        groups = [token_arrays(batch), columns, [logprob_rows], layout_arrays(batch), self._plan(batch)]
        if len(entries[0]) == _MAX_STAGED_ENTRIES:
            groups.append(entries)
        tokens, how, (rows,), layout, plan, *staged = self._staging.send(buffer, groups)
        changes = staged[0] if staged else [self._staging.upload(column) for column in entries]
        inputs = forward_inputs(batch, tokens, layout, plan)
        sampling = sampling_inputs(how, changes, self._penalty_slots.token_counts)
        suppress = None if bad_words is None else bad_words.on_device(self._staging.upload)
        return self._launches(inputs, sampling, filtered, suppress), rows

    def _lay_out_decode(
        self, buffer: StagingBuffer, batch: Batch, columns: Arrays, entries: Arrays, logprob_rows: NDArray[np.int64]
    ) -> tuple[_Launches, Tensor]:
        """The same for a batch of decodes that a graph computes, padded to the rows of the columns."""
        groups = [*self._decode_groups(batch, columns, entries), [logprob_rows], [batch.block_tables]]
        *_, (rows,), (tables,) = self._staging.send(buffer, groups)
        self._block_tables[: len(tables), : tables.shape[1]].copy_(tables)
        return self._decodes[len(columns[0])], rows

    def _launches(
        self,
        inputs: ForwardInputs,
        how: SamplingInputs,
        filtered: Items[tuple[int, SamplingParams]] = (),
        bad_words: DeviceBadWords | None = None,
    ) -> _Launches:
        num_rows = len(how.sampling.seeds)
        logits = self._logits[:num_rows]
        return _Launches(
            lambda: self._forward(inputs, self._sampled, logits),
            lambda: adjust_and_sample(logits, how, self._sampled, filtered, bad_words),
            lambda masks: adjust_and_sample(logits, how, self._sampled, filtered, bad_words, masks),
        )

    def _decode_groups(self, batch: Batch, columns: Arrays, entries: Arrays) -> list[Arrays]:
        """The inputs of graphs, padded to as many rows as the columns have. Each array has a size of its own for them.

        A padding row is stored nowhere and has no context.
        """
        bucket = len(columns[0])
        rows = [padded(array, bucket, fill) for array, fill in zip(token_arrays(batch), (0, 0, -1, 0), strict=True)]
        return [rows, self._forward.attention.plan(batch, bucket), columns, entries]

    @torch.inference_mode()
    def _capture(self, sizes: Items[int], capture: Callable[[Work], Work], report: Callable[[int, int], None]) -> None:
        """Captures the launches for each batch size; the largest first, because its memory serves the others.

        The capture reads the addresses that `_lay_out_decode` fills for as many rows. They are empty now.
        """
        for place, bucket in enumerate(reversed(sizes), start=1):
            columns = sampling_columns([], [], np.empty(0, np.int64), bucket)
            groups = self._decode_groups(empty_batch(), columns, _pad_entries(self._entry_lists.of([], [])))
            with self._staging.next_buffer() as buffer:
                tokens, plan, how, changes = self._staging.send(buffer, groups)
            token_ids, positions, slots, context_lens = tokens
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
                plan=plan,
            )
            launches = self._launches(inputs, sampling_inputs(how, changes, self._penalty_slots.token_counts))
            self._decodes[bucket] = replace(
                launches, forward=capture(launches.forward), adjust_and_sample=capture(launches.adjust_and_sample)
            )
            report(place, len(sizes))


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


def _pad_entries(entries: Arrays) -> Arrays:
    """Columns of `LogitEntries`, padded to a multiple of _MAX_STAGED_ENTRIES and at least to that.

    Kernels are compiled again for some lengths, which must not happen while serving.
    """
    length = max(1, -(-len(entries[0]) // _MAX_STAGED_ENTRIES)) * _MAX_STAGED_ENTRIES
    return [padded(column, length, fill) for column, fill in zip(entries, (-1, 0, 0), strict=True)]
