"""An attention backend as another package may have it: torch's operators, and a plan that holds the contexts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels.paged_attention import paged_attention_reference
from worker_svc.batch import Batch
from worker_svc.cache import LayerCache
from worker_svc.gpu.device_attention import Arrays, AttentionSetup, DeviceAttention, PlannedAttention
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.gpu.staging import ALIGNMENT

num_calls = 0
"""Of attention in all layers."""


class ReferenceAttention:
    """Plain torch, sequence by sequence. It waits for the device, so it cannot be captured there."""

    def __init__(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> None:
        self._layers = list(zip(setup.layers, caches, strict=True))

    @property
    def mixed_graph_problem(self) -> str | None:
        return "reads contexts on the host"

    def num_plan_bytes(self, num_seqs: int) -> int:
        return 4 * num_seqs + ALIGNMENT

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        return [batch.context_lens]

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        (contexts,) = inputs.plan

        def attend(layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
            global num_calls
            num_calls += 1
            rule, cache = self._layers[layer]
            # The plan is that of the step, also in a graph.
            assert torch.equal(contexts, inputs.context_lens)
            # Rows of padding, which have no context, are the last ones.
            num_seqs = int((contexts > 0).sum())
            return paged_attention_reference(
                query,
                cache.keys,
                cache.values,
                inputs.block_tables[:num_seqs],
                inputs.query_starts[: num_seqs + 1],
                contexts[:num_seqs],
                inputs.max_query_len,
                rule.scale,
                window=rule.window,
                soft_cap=rule.soft_cap,
                sinks=sinks,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
                out=torch.zeros_like(query),
            )

        return attend


class ReferenceBackend:
    """A `DeviceAttentionBackend`."""

    computes_sinks = True

    def library_version(self) -> str:
        return f"torch {torch.__version__}"

    def unsupported_reason(self, setup: AttentionSetup) -> str | None:
        return "caches in 8 bits" if setup.cache_dtype.itemsize == 1 else None

    def make(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> DeviceAttention:
        return ReferenceAttention(setup, caches)


BACKEND = ReferenceBackend()
