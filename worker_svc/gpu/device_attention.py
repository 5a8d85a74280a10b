"""The interface of attention on a GPU. A backend is a module of `attention_backends`, or an entry point of
`quire.attention_backends`.

A backend reads keys and values from the worker's cache, in which the step's own are stored already, and may plan each
step on the host. Models with latent attention have kernels of their own (`worker_svc.model.triton_latent`), which use
the same interface.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.cache import LayerCache
from worker_svc.errors import StartupFailed
from worker_svc.gpu import attention_backends
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model_layout import LayerAttention
from worker_svc.plugins import Registry

DEFAULT_BACKEND = "triton"
Arrays = list[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What is attended with and to. All layers have the same heads; each has a rule of its own. A model whose layers
    differ in their heads has a setup for each shape of heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Of queries and outputs."""
    cache_dtype: torch.dtype
    """int8 and float8_e4m3fn: the cache has scales, as `quire_kernels.kv_quantization` says."""
    device: torch.device
    layers: tuple[LayerAttention, ...]
    max_step_tokens: int
    max_sequences: int
    """Of a step. One that runs as a CUDA graph is padded, to `graph_shapes.max_padded_sequences` at most."""
    context_length: int
    """The most tokens of a sequence."""
    deterministic: bool = False
    """Whether a query's bits must depend on nothing but itself and its context."""


class PlannedAttention(Protocol):
    """Attention of one step. That of a graph is called while the graph is captured, and not again."""

    def __call__(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """The output of each query [num_tokens, num_heads, head_dim] in a layer, in the shape and dtype of `query`.

        A query sees the keys up to its own position, as the layer's rule says. `sinks` float32 [num_heads] are those of
        a layer that has some. It must wait for nothing, and allocate with torch only.
        """


class DeviceAttention(Protocol):
    """Attention of all layers over one cache. For one thread, under `torch.inference_mode`."""

    @property
    def mixed_graph_problem(self) -> str | None:
        """Why steps with prompts cannot run as CUDA graphs, as a clause after the backend's name; None: they can.

        Steps in which each sequence decodes run as graphs in any case.
        """

    def num_plan_bytes(self, num_seqs: int) -> int:
        """The most bytes that `plan` returns for so many sequences, each array rounded up to `staging.ALIGNMENT`."""

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        """What the device needs to know of a step beside its `ForwardInputs`: int32, int64, float32 or float64 arrays.

        It is called right before the step is enqueued, or before a piece of a prompt whose log-probabilities are
        asked for. The arrays are copied to the device with the step's other inputs.

        The batch is as in the `ForwardInputs`, except for its block tables: the first `num_single` sequences have one
        token each. That of a step that runs as a graph is padded to the graph's numbers of tokens and sequences: rows
        of padding have no context, and in a graph with prompts no token, but for one that holds the tokens of padding.
        The shapes of the arrays must then depend on these numbers alone: the graph reads them where they were when it
        was captured, with an empty batch. `worker_svc/gpu/graph_shapes.py` describes the padding.
        """

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        """The attention of a step, whose plan is on the device as `inputs.plan`.

        The output of a token without context is finite, whatever it is.
        """


class DeviceAttentionBackend(Protocol):
    """Makes attention over caches. One with an attribute `computes_sinks` that is true takes layers with sinks."""

    def library_version(self) -> str:
        """The names and versions of the libraries that compute attention, beside the package of the backend.

        In deterministic mode, workers with other versions than these do not share cached blocks: their bits may differ.
        """

    def unsupported_reason(self, setup: AttentionSetup) -> str | None:
        """What of a setup is not supported, as the object of "does not support"; None: all of it is."""

    def make(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> DeviceAttention:
        """Attention over the layers' views of a cache, of a setup that is supported."""


def _is_backend(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("library_version", "unsupported_reason", "make"))


_registry = Registry(
    attention_backends,
    "BACKEND",
    "quire.attention_backends",
    _is_backend,
    "an object with the methods library_version, unsupported_reason and make",
)


def check_attention_backend(name: str, device: torch.device) -> None:
    """Raises StartupFailed if there is no backend of this name, or the device is not for it."""
    if device.type == "cuda":
        find_attention_backend(name)
    elif name != DEFAULT_BACKEND:
        raise StartupFailed(f"QUIRE_ATTENTION_BACKEND is {name}, which is for GPUs, but the device is a CPU")


def arithmetic_of_backend(name: str) -> str:
    """What the backend of this name adds to the name of a worker's arithmetic: its own name, who registers it, and the
    versions of its libraries. Raises StartupFailed if there is none or it fails.
    """
    if name == DEFAULT_BACKEND:
        return ""
    backend = find_attention_backend(name)
    with _registry.running(name):
        version = backend.library_version()
    return f" {name} {_registry.origin(name)} {version}"


def find_attention_backend(name: str) -> DeviceAttentionBackend:
    """The backend of this name. Raises StartupFailed if there is none or it cannot be loaded."""
    backend: DeviceAttentionBackend | None = _registry.find(name)
    if backend is None:
        raise StartupFailed(f"QUIRE_ATTENTION_BACKEND is {name}; known backends are {', '.join(_registry.names())}")
    return backend


def make_device_attention(name: str, setup: AttentionSetup, caches: Sequence[LayerCache]) -> DeviceAttention:
    """The attention of the backend of this name. Raises StartupFailed, which names what it does not support."""
    backend = find_attention_backend(name)
    with _registry.running(name):
        refused = _refused_sinks(backend, setup) or backend.unsupported_reason(setup)
        if refused is None:
            made = backend.make(setup, caches)
            return made if name == DEFAULT_BACKEND else _ForeignAttention(name, made)
    raise StartupFailed(f"QUIRE_ATTENTION_BACKEND is {name}, which does not support {refused}")


def _refused_sinks(backend: DeviceAttentionBackend, setup: AttentionSetup) -> str | None:
    """A backend that knows nothing of sinks would leave them out."""
    is_fit = getattr(backend, "computes_sinks", False) or not any(layer.has_sinks for layer in setup.layers)
    return None if is_fit else "attention sinks"


class _ForeignAttention:
    """A `DeviceAttention` of another library. Its errors name the backend, since they may name nothing of Quire."""

    def __init__(self, name: str, attention: DeviceAttention) -> None:
        self._name, self._attention = name, attention

    @property
    def mixed_graph_problem(self) -> str | None:
        problem = self._attention.mixed_graph_problem
        return None if problem is None else f"QUIRE_ATTENTION_BACKEND is {self._name}, which {problem}"

    def num_plan_bytes(self, num_seqs: int) -> int:
        return self._attention.num_plan_bytes(num_seqs)

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        with self._named("plan"):
            return self._attention.plan(batch, num_single)

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        with self._named("attend"):
            attend = self._attention.attend(inputs)

        def named(layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
            with self._named("attention"):
                return attend(layer, query) if sinks is None else attend(layer, query, sinks)

        return named

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # known by their types
        except Exception as error:  # any exception of another library
            raise RuntimeError(
                f"QUIRE_ATTENTION_BACKEND is {self._name}, whose {what} failed: {type(error).__name__}: {error}"
            ) from error
