"""A model of transformers' own modules on a GPU: between its modules, attention is Quire's, by the plan of the step."""

from typing import Any

import torch
from torch import Tensor

from quire_kernels.store_kv import store_kv
from worker_svc.cache import KVCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.gpu.device_attention import AttentionSetup, make_device_attention
from worker_svc.gpu.executor import DeviceExecutor
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.attention_interface import AttentionCall, run
from worker_svc.model.probe import FoundAttention, find_host_wait
from worker_svc.out_of_memory import is_out_of_memory


def make_device_executor(
    model: Any,
    found: FoundAttention,
    cache: KVCache,
    limits: WorkerLimits,
    graphs: CudaGraphOptions,
    attention_backend: str,
) -> Executor:
    """The executor of a model that passed the probe, with one number of heads.

    Raises StartupFailed if the backend does not support it.
    """
    forward = TritonTransformersForward(model, found, cache, limits, attention_backend)

    def make() -> Executor:
        return DeviceExecutor(forward, limits, cache.device, cuda_graphs=graphs.enabled, report=graphs.report)

    try:
        return make()
    except RuntimeError as error:
        # An error of another kind may be one of the device, or of an attention backend.
        if "captur" not in str(error) or is_out_of_memory(error):
            raise
        # Only a device knows: the same modules may wait on a GPU, and in one dtype only.
        forward.graph_problem = f"the modules of transformers cannot be captured: {error}"
    return make()


class TritonTransformersForward:
    """A `worker_svc.gpu.forward_graphs.DeviceForward`."""

    def __init__(
        self, model: Any, found: FoundAttention, cache: KVCache, limits: WorkerLimits, attention_backend: str
    ) -> None:
        self._model, self._places = model, found.places
        self._caches = cache.layers
        layout = found.layout
        setup = AttentionSetup(
            found.num_heads[0],
            layout.kv[0].num_heads,
            layout.kv[0].head_dim,
            cache.block_size,
            model.dtype,
            cache.dtype,
            cache.device,
            layout.layers,
            limits.max_step_tokens,
            limits.max_sequences,
            limits.context_length,
        )
        self.attention = make_device_attention(attention_backend, setup, self._caches)
        wait = find_host_wait(model)
        self.graph_problem = None if wait is None else f"the modules of transformers wait for the device in {wait}"

    def __call__(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        attend = self.attention.attend(inputs)

        def attend_layer(call: AttentionCall) -> Tensor:
            place = self._places[call.layer]
            cache = self._caches[place]
            scales = {"key_scales": cache.key_scales, "value_scales": cache.value_scales}
            store_kv(call.key, call.value, cache.keys, cache.values, inputs.slots, **scales)
            return attend(place, call.query.contiguous(), call.sinks)

        token_ids = _with_sampled(inputs.token_ids, sampled)
        logits.copy_(run(self._model, token_ids, inputs.positions, inputs.logits_indices, attend_layer))


def _with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """The tokens; in place of -1 - row, the token that the last step sampled at that row.

    Where it sampled none, that is -1: the result is not used, but the lookup must be in bounds.
    """
    rows = (-1 - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, sampled[rows], token_ids).clamp_(min=0)
