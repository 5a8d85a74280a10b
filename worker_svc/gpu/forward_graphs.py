"""Forward passes that are captured as CUDA graphs: each reads its inputs at fixed addresses."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.gpu.device_attention import Arrays, DeviceAttention
from worker_svc.gpu.graph_shapes import GraphShape, capture_sizes, draft_shapes, mixed_shapes
from worker_svc.gpu.graphs import Work
from worker_svc.gpu.inputs import ForwardInputs, decodes_only, empty_batch, layout_arrays, token_arrays
from worker_svc.gpu.staging import Staging


class DeviceForward(Protocol):
    """A model over its own paged cache on the device. For one thread, under `torch.inference_mode`.

    It allocates with torch. If it has no graph problem, it waits for nothing, so that it can be captured.
    """

    @property
    def graph_problem(self) -> str | None:
        """Why no step can run as a CUDA graph, as a sentence without its period; None: steps can."""

    @property
    def attention(self) -> DeviceAttention:
        """What plans each step."""

    def __call__(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        """Enqueues a step: stores keys and values in their slots, writes the logits of the sampled rows to `logits`.

        `sampled` int64 [rows] holds the tokens that placeholders refer to; `logits` is float32 [num_rows, vocab_size].
        """


class ForwardGraphs:
    """Graphs of decodes, by the number of sequences, and of mixed steps and drafts, by the number of tokens.

    Inputs are staged from `begin` on: where an array lies depends on the graph's shape alone. Block tables are at full
    width at an address of their own; a step's are as wide as its longest context.
    """

    def __init__(
        self, forward: DeviceForward, limits: WorkerLimits, device: torch.device, staging: Staging, begin: int
    ) -> None:
        self._forward, self._staging, self._begin = forward, staging, begin
        self._decodes = [GraphShape.of_decodes(size) for size in capture_sizes(limits.max_sequences)]
        self._mixed: list[GraphShape] = []
        self._drafts: list[GraphShape] = []
        if forward.attention.mixed_graph_problem is None:
            most = limits.max_step_tokens, limits.max_sequences
            self._mixed = mixed_shapes(*most)
            if limits.max_draft_tokens:
                self._drafts = draft_shapes(*most, limits.max_sampled_rows)
        max_blocks = -(-limits.context_length // limits.block_size)
        num_tables = max(shape.num_seqs for shape in self.shapes)
        self._block_tables = torch.zeros((num_tables, max_blocks), dtype=torch.int32, device=device)
        self._graphs: dict[GraphShape, Work] = {}

    @property
    def shapes(self) -> list[GraphShape]:
        """Of all graphs, the largest first: its memory serves the others."""
        return [*reversed(self._drafts), *reversed(self._mixed), *self.decode_shapes]

    @property
    def decode_shapes(self) -> list[GraphShape]:
        """Of graphs of decodes, the largest first."""
        return self._decodes[::-1]

    def forget(self) -> None:
        """Drops all graphs."""
        self._graphs.clear()

    def find(self, batch: Batch) -> GraphShape | None:
        """The shape of the smallest captured graph that computes the batch."""
        size = len(batch.token_ids)
        for shapes in (self._decodes,) if decodes_only(batch) else (self._mixed, self._drafts):
            place = bisect_left(shapes, size, key=lambda shape: shape.num_tokens)
            if place < len(shapes) and shapes[place] in self._graphs and shapes[place].holds(batch):
                return shapes[place]
        return None

    def capture(
        self, shapes: Items[GraphShape], capture: Callable[[Work], Work], sampled: Tensor, logits: Tensor
    ) -> Iterator[None]:
        """Captures the graph of each shape, with an empty batch; yields after each."""
        for shape in shapes:
            with self._staging.next_buffer() as buffer:
                tokens, layout, plan = self._staging.send(buffer, self._groups(empty_batch(), shape), self._begin)
            inputs = self._inputs(shape, tokens, layout, plan)
            rows = logits[: shape.num_rows]
            self._graphs[shape] = capture(lambda inputs=inputs, rows=rows: self._forward(inputs, sampled, rows))  # type: ignore[misc]
            yield

    def groups(self, batch: Batch, shape: GraphShape) -> list[Arrays]:
        """The arrays of a batch that are staged: first those of the graph, then its block tables."""
        return [*self._groups(batch, shape), [batch.block_tables]]

    def launch_of(self, batch: Batch, shape: GraphShape, block_tables: Tensor) -> Work:
        """The launch of a batch whose arrays are staged, as `block_tables` [num_seqs, width] are."""
        num_single, longer = shape.rows_of(batch)
        width = block_tables.shape[1]
        self._block_tables[:num_single, :width].copy_(block_tables[:num_single])
        if longer.stop > longer.start:
            self._block_tables[longer, :width].copy_(block_tables[num_single:])
        return self._graphs[shape]

    def _groups(self, batch: Batch, shape: GraphShape) -> list[Arrays]:
        batch = shape.pad(batch)
        query_starts, logits_indices, _ = layout_arrays(batch)
        plan = self._forward.attention.plan(batch, shape.num_single)
        return [token_arrays(batch), [query_starts, logits_indices], plan]

    def _inputs(
        self, shape: GraphShape, tokens: Items[Tensor], layout: Items[Tensor], plan: Items[Tensor]
    ) -> ForwardInputs:
        token_ids, positions, slots, context_lens = tokens
        query_starts, logits_indices = layout
        return ForwardInputs(
            token_ids,
            positions,
            slots,
            self._block_tables[: shape.num_seqs],
            query_starts=query_starts,
            context_lens=context_lens,
            logits_indices=logits_indices if shape.is_mixed else None,
            num_single=shape.num_single,
            max_query_len=shape.num_tokens if shape.is_mixed else 1,
            plan=plan,
        )
