"""Steps on a GPU that the host never waits for: all work is enqueued in one stream, and so are the copies of sampled
tokens.

Three things have fixed addresses, because graphs are captured once and replayed with other values: staged inputs of a
step, the logits, and the tokens sampled last. Each is read and written in stream order only. So the next step may be
enqueued while one runs: its placeholders refer to that step's tokens in `sampled`.

The forward pass and the sampling of a step are graphs of their own, so that each runs as one whatever the other is.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.executor import SampleHandle, run_inline
from worker_svc.gpu.device_attention import Arrays
from worker_svc.gpu.forward_graphs import DeviceForward, ForwardGraphs
from worker_svc.gpu.graph_shapes import max_padded_sequences
from worker_svc.gpu.graphs import GraphCapture, Work, keep_work, run_without_capture
from worker_svc.gpu.inputs import count_single, forward_inputs, layout_arrays, token_arrays
from worker_svc.gpu.logprobs import ReportedRows
from worker_svc.gpu.matchers import SequenceMatchers
from worker_svc.gpu.sample_handle import DeviceSampleHandle
from worker_svc.gpu.sampling import DeviceMasks
from worker_svc.gpu.staging import ALIGNMENT, Staging, StagingBuffer
from worker_svc.gpu.step_sampler import RowsToSample, StepSampler
from worker_svc.out_of_memory import Drafts, StepWork, launch_within_memory
from worker_svc.prompt_logprobs import PromptPiece
from worker_svc.sequences import Sequence
from worker_svc.step import SamplingParams

_log = logging.getLogger(__name__)

# Bytes of a forward pass's inputs: per token, per sampled row, per sequence; and arrays padded for alignment.
_TOKEN_BYTES, _ROW_BYTES, _SEQUENCE_BYTES, _NUM_ARRAYS = 24, 16, 16, 24


T = TypeVar("T")


class DeviceExecutor:
    """An `Executor` of a GPU. On a CPU it does the same through Triton's interpreter, for tests.

    If graphs are enabled and the model can be captured, the forward pass runs as a CUDA graph in steps in which each
    sequence decodes, and in small mixed steps, if the attention backend can. All other steps are enqueued kernel by
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
        deterministic: bool = False,
    ) -> None:
        """With `cuda_graphs` all graphs are captured here; `report` receives how many are done, and of how many. With
        `deterministic` the token of equal logits does not depend on other rows, to the last bit.

        All memory that does not depend on a step is allocated here too.
        """
        self._forward, self._limits, self._device = forward, limits, device
        self._has_sampled = False  # in the step that was launched last
        max_rows = limits.max_sampled_rows
        max_logits = max(max_rows, limits.max_scored_rows)
        self._forward_begin = StepSampler.num_bytes(limits)
        self._staging = Staging(self._forward_begin + _num_forward_bytes(limits, forward), 8 * max_rows, device)
        # Zeros: kernels are compiled and graphs captured with these rows before a step has computed any.
        self._logits = torch.zeros((max_logits, limits.vocab_size), dtype=torch.float32, device=device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._sampler = StepSampler(
            limits, device, self._staging, self._logits, self._sampled, deterministic=deterministic
        )
        self._graphs = ForwardGraphs(forward, limits, device, self._staging, self._forward_begin)
        self._matchers = SequenceMatchers()
        if cuda_graphs and forward.graph_problem is not None:
            _log.info("only sampling runs as CUDA graphs: %s", forward.graph_problem)
        elif cuda_graphs and forward.attention.mixed_graph_problem is not None:
            _log.info("only decodes run as CUDA graphs: %s", forward.attention.mixed_graph_problem)
        if cuda_graphs:
            self._capture(_capture_for(device), report)
        elif device.type != "cpu":
            self._compile()

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
        return not self._has_sampled

    def _launch(self, work: StepWork[Sequence]) -> DeviceSampleHandle:
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
        rows = RowsToSample.of(work.sampled, work.drafts)
        reported = ReportedRows.of([sequence.params for sequence in rows.sequences], self._limits.vocab_size)
        scored = [self._score(piece) for piece in work.pieces]
        sample = self._sampler.prepare(buffer, rows)
        forward, logprob_rows = self._lay_out(buffer, work.batch, len(rows), reported.rows)

        forward()
        logprobs, masks, packed = None, None, None
        if len(reported.rows):
            # Before sampling, which changes the logits.
            logprobs = reported.prepare(self._logits.index_select(0, logprob_rows), self._staging.upload)
        if logprobs is not None or scored:
            num_bytes = self._sampled.itemsize * len(rows) + reported.num_bytes
            packed = self._staging.reserve(buffer, num_bytes + sum(of_piece.num_bytes for of_piece, _ in scored))
        if rows.is_constrained:
            # The device computes the forward pass while the host makes the masks.
            of_rows = self._matchers.masks(rows.whole, rows.drafts)
            masks = DeviceMasks(self._staging.upload(of_rows.rows), self._staging.upload(of_rows.bits))
        sample(masks)
        # Nothing is allocated from here on: the tokens that the step's placeholders refer to are overwritten, so it
        # could not be launched again.
        self._has_sampled = True
        parts = [self._sampled[: len(rows)]]
        if logprobs is not None:
            parts += logprobs.complete(self._sampled, logprob_rows)
        for _, values_and_ids in scored:
            parts += values_and_ids
        outputs = self._staging.fetch(buffer, parts, packed)
        return outputs, len(rows), reported, [of_piece for of_piece, _ in scored]

    def can_verify(self, params: SamplingParams) -> bool:
        """Not with penalties: the rows of a step do not see each other's tokens."""
        return not params.has_penalties

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
        return reported, reported.prepare(logits, upload).complete(upload(piece.next_tokens))

    def _plan(self, batch: Batch) -> Arrays:
        return self._forward.attention.plan(batch, count_single(batch))

    def _lay_out(
        self, buffer: StagingBuffer, batch: Batch, num_rows: int, logprob_rows: NDArray[np.int64]
    ) -> tuple[Work, Tensor]:
        """Stages a batch. Returns its forward pass, and on the device the rows that request log-probabilities."""
        shape = self._graphs.find(batch)
        if shape is not None:
            groups = [*self._graphs.groups(batch, shape), [logprob_rows]]
            *_, (tables,), (rows,) = self._staging.send(buffer, groups, self._forward_begin)
            return self._graphs.launch_of(batch, shape, tables), rows
        groups = [token_arrays(batch), layout_arrays(batch), self._plan(batch), [logprob_rows]]
        tokens, layout, plan, (rows,) = self._staging.send(buffer, groups, self._forward_begin)
        inputs, logits = forward_inputs(batch, tokens, layout, plan), self._logits[:num_rows]
        return lambda: self._forward(inputs, self._sampled, logits), rows

    @torch.inference_mode()
    def _capture(self, capture: Callable[[Work], Work], report: Callable[[int, int], None]) -> None:
        """Captures all graphs: of forward passes, unless they cannot be captured, then of sampling."""
        if self._forward.graph_problem is not None:
            self._compile_forward()
        shapes = self._graphs.shapes if self._forward.graph_problem is None else []
        sizes = self._sampler.capture_sizes
        done = 0
        for graphs in (
            self._graphs.capture(shapes, capture, self._sampled, self._logits),
            self._sampler.capture(sizes, capture),
        ):
            for _ in graphs:
                done += 1
                report(done, len(shapes) + len(sizes))

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compiles the kernels that depend on the number of sequences. Nothing is captured."""
        self._compile_forward()
        for _ in self._sampler.capture(self._sampler.capture_sizes, run_without_capture):
            pass
        self._sampler.forget()

    def _compile_forward(self) -> None:
        for _ in self._graphs.capture(self._graphs.decode_shapes, run_without_capture, self._sampled, self._logits):
            pass
        self._graphs.forget()


def _num_forward_bytes(limits: WorkerLimits, forward: DeviceForward) -> int:
    """The most bytes of a forward pass's staged inputs."""
    max_blocks = -(-limits.context_length // limits.block_size)
    num_seqs = max_padded_sequences(limits.max_sequences, has_drafts=limits.max_draft_tokens > 0)
    return (
        max(limits.max_step_tokens, limits.max_sequences) * _TOKEN_BYTES
        + 2 * limits.max_sampled_rows * _ROW_BYTES
        + num_seqs * (_SEQUENCE_BYTES + 4 * max_blocks)
        + _NUM_ARRAYS * ALIGNMENT
        + forward.attention.num_plan_bytes(num_seqs)
    )


def _capture_for(device: torch.device) -> Callable[[Work], Work]:
    """How graphs are captured; without a GPU they are not, in tests and where kernels are compiled ahead of time."""
    if device.type == "cuda":
        return GraphCapture()
    return keep_work if device.type == "cpu" else run_without_capture
