"""Any architecture that transformers has, by its own modules, over the paged cache."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from quire_kernels.cpu.sample import top_logprobs
from worker_svc.attention import AttentionBackend, AttentionKind, CompiledKernels, Kernels, make_attention
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.description import WorkerLimits
from worker_svc.errors import UnsupportedModel
from worker_svc.executor import CudaGraphOptions, Executor, HostExecutor
from worker_svc.gpu.device_attention import DEFAULT_BACKEND
from worker_svc.model.attention_interface import PAGED, AttentionCall, run
from worker_svc.model.head import Head
from worker_svc.model.probe import IncompatibleModel, probe
from worker_svc.model.weights import weight_files
from worker_svc.model_layout import ModelLayout
from worker_svc.out_of_memory import is_out_of_memory


class TransformersModel:
    """A causal language model of transformers that passed the probe."""

    def __init__(self, model: Any, kernels: Kernels, attention_backend: str = DEFAULT_BACKEND) -> None:
        """With Triton's kernels, executors compute attention by the backend of the name `attention_backend`.

        Raises IncompatibleModel.
        """
        self._model, self._kernels, self._attention_backend = model, kernels, attention_backend
        self._found = probe(model)
        numbers = sorted(set(self._found.num_heads))
        if kernels is AttentionKind.TRITON and len(numbers) > 1:
            heads = ", ".join(map(str, numbers))
            raise IncompatibleModel(
                f"has layers with different numbers of query heads ({heads}), which is not supported on a GPU"
            )

    @property
    def layout(self) -> ModelLayout:
        return self._found.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        if self._kernels is AttentionKind.TRITON:
            from worker_svc.model.triton_transformers import make_device_executor

            return make_device_executor(self._model, self._found, cache, limits, graphs, self._attention_backend)
        attention = make_attention(self._kernels, cache, self.layout, self._model.dtype)
        forward = TransformersForward(self._model, attention, self._found.places)
        if isinstance(self._kernels, CompiledKernels):
            pool = self._kernels.thread_pool
            return HostExecutor(forward, CompiledSampler(pool), partial(top_logprobs, pool))
        return HostExecutor(forward)


class TransformersForward:
    """The tokens of a step as one sequence, without a cache of transformers; a `worker_svc.forward.Forward`.

    For a CPU; that of a GPU is in `triton_transformers`.
    """

    def __init__(self, model: Any, attention: AttentionBackend, places: dict[int, int]) -> None:
        self._model, self._attention, self._places = model, attention, places

    def __call__(self, batch: Batch) -> Tensor:
        attention = self._attention.plan(batch)

        def attend(call: AttentionCall) -> Tensor:
            return attention(self._places[call.layer], call.query, call.key, call.value, call.sinks)

        token_ids, positions, logits_indices = (
            torch.from_numpy(values) for values in (batch.token_ids, batch.positions, batch.logits_indices)
        )
        return run(self._model, token_ids, positions, logits_indices, attend)


class _Float32Logits:
    """An output product with float32 logits, although its weights are not float32."""

    def __init__(self, linear: nn.Linear) -> None:
        self._width = linear.out_features
        self._head = Head(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of hidden states [..., hidden_size]."""
        rows = hidden.flatten(0, -2)
        logits = self._head(rows) if len(rows) else rows.new_empty(0, self._width, dtype=torch.float32)
        return logits.view(*hidden.shape[:-1], self._width)


def load_transformers_model(
    config: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    attention_backend: str = DEFAULT_BACKEND,
) -> TransformersModel:
    """Loads the model of a directory, given its config. Raises UnsupportedModel, which says why it cannot be served."""
    try:
        check_class(config)
        return TransformersModel(load_modules(config, directory, dtype, device), kernels, attention_backend)
    except IncompatibleModel as error:
        raise UnsupportedModel(f"the model in {directory} {error}") from None
    except Exception as error:  # a model's class raises anything for values of its config that it does not expect
        if is_out_of_memory(error):
            raise
        raise UnsupportedModel(f"transformers cannot load the model in {directory}: {error!r}") from error


# transformers' names of layers that keep states, or combine them with attention.
_KINDS_WITH_STATES = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})


def check_class(config: Any) -> None:
    """Raises IncompatibleModel for an architecture that is never served, before its weights are read."""
    named = ", ".join(config.architectures or [config.model_type])
    if getattr(config, "is_encoder_decoder", False):
        raise IncompatibleModel(
            f"is an encoder-decoder, of the architecture {named}; only decoders alone, and encoders alone, are served"
        )
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None or config.architectures not in (None, [model_class.__name__]):
        raise IncompatibleModel(f"is of the architecture {named}, which is no causal language model of transformers'")
    # Some classes have both models with states and models without: their kinds of layers decide.
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    if kinds & _KINDS_WITH_STATES or (model_class._is_stateful and not model_class._supports_attention_backend):
        raise IncompatibleModel(
            f"is a state-space or recurrent model, or a hybrid with such layers, of the architecture {named}; only "
            "models whose layers all attend over keys and values are served"
        )
    takes = inspect.signature(model_class.forward).parameters
    if not model_class._supports_attention_backend or not {"position_ids", "logits_to_keep"} <= set(takes):
        raise IncompatibleModel(f"is of the architecture {named}, whose attention cannot be replaced in transformers")


def load_modules(config: Any, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a directory, which calls paged attention. Raises IncompatibleModel, or an error of its class."""
    weight_files(directory)
    # transformers' types are incomplete here.
    auto: Any = AutoModelForCausalLM
    log: Any = logging
    # The worker reports progress itself.
    log.disable_progress_bar()
    model, loading_info = auto.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=PAGED,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for what, fault in (("missing_keys", "has no tensors"), ("unexpected_keys", "has tensors that it does not use:")):
        names = sorted(loading_info[what])
        if names:
            raise IncompatibleModel(f"{fault} {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}")
    if loading_info["mismatched_keys"]:
        raise IncompatibleModel(f"has tensors of the wrong shape: {sorted(loading_info['mismatched_keys'])[0][0]}")
    model = model.to(device).eval()
    output = model.get_output_embeddings()
    if dtype != torch.float32 and type(output) is nn.Linear:
        # A separate attribute: other users of the module still find its weights. After these are on the device, since
        # it keeps them.
        vars(output)["forward"] = _Float32Logits(output)
    return model
