"""The kernels of a step: the real forward pass runs on meta tensors, and what it launches is recorded."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.aot.targets import TARGETS, intercepted_launches
from benchmarks.gpu.random_model import MetaCheckpoint
from quire_kernels.sample_greedy import sample_greedy
from worker_svc.batch import Batch, SequenceChunk, make_batch
from worker_svc.cache import CacheShape
from worker_svc.description import WorkerLimits
from worker_svc.gpu.inputs import ForwardInputs, count_single, forward_inputs, layout_arrays, token_arrays
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.triton_model import TritonForward, TritonModel

META = torch.device("meta")
BLOCK_SIZE = 16
# Of these runs, the fastest is the host's time.
_TIMED = 10
# Arguments of kernels that are read in a few places only: caches, tables of embeddings.
_SPARSE_ARGUMENTS = ("p_key_cache", "p_value_cache", "p_embedding", "p_position_embedding", "p_sampled")
_FREE = ("empty", "empty_like", "new_empty", "detach", "alias")


@dataclass(frozen=True)
class Launch:
    """A kernel: how many bytes it reads and writes at least, and the operations of its products."""

    name: str
    num_bytes: int
    operations: int = 0
    grid: tuple[int, ...] = ()

    @property
    def is_attention(self) -> bool:
        """Whether its bytes and operations depend on contexts, so that they are not in here."""
        return self.name in ("_decode_kernel", "_paged_attention_kernel")


@dataclass(frozen=True)
class StepTrace:
    """The kernels of one step, and the seconds that Python took on this machine: to lay the step out, with its tiles of
    queries and its plan of decodes, and to prepare the launches.
    """

    launches: Sequence[Launch]
    layout_seconds: float
    launch_seconds: float


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records torch's own operations, and by `record` those of Triton."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []

    def record(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Takes the place of `JITFunction.run`. Arguments are bound as for a real launch, which takes the host time."""
        binder = function.device_caches[0][-1]
        bound, _, _ = binder(*args, **options, debug=False, instrumentation_mode="")
        tensors = {id(value): value for name, value in bound.items() if _is_dense(name, value)}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.launches.append(Launch(function.__name__, num_bytes, grid=tuple(grid)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _FREE:
            given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
            results = [result] if isinstance(result, Tensor) else []
            tensors = {id(tensor): tensor for tensor in (*given, *results)}
            operations = 0
            if name in ("linear", "mm"):
                left, right = given[:2]
                outputs = right.shape[0] if name == "linear" else right.shape[1]
                operations = 2 * left.shape[0] * left.shape[1] * outputs
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            if name == "index_select":
                num_bytes = 2 * result.nbytes
            self.launches.append(Launch(name, num_bytes, operations))
        return result


def _is_dense(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in _SPARSE_ARGUMENTS


class TracedModel:
    """A model of a config.json's content on meta tensors, with the tiles and plans of a target."""

    def __init__(self, raw_config: dict[str, Any], target: str, max_sequences: int, num_blocks: int) -> None:
        self._target, self._recorder = TARGETS[target], _Recorder()
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(raw_config))
            description = describe(read_config(Path(folder)))
        if description is None:
            raise ValueError("the native modules do not compute this model")
        layout = description.layout
        self.limits = WorkerLimits(
            layout.vocab_size, layout.context_length, BLOCK_SIZE, num_blocks, 2048, max_sequences
        )
        with torch.inference_mode(), intercepted_launches(self._target, self._recorder.record):
            checkpoint = MetaCheckpoint()
            model = TritonModel(description, checkpoint)
            self.layout = model.layout
            cache = CacheShape.of(layout, BLOCK_SIZE, torch.bfloat16).allocate(num_blocks, META)
            self._forward = TritonForward(model, cache, self.limits)
        self.weight_bytes = checkpoint.num_bytes

    def trace(self, batch: Batch) -> StepTrace:
        """The kernels of a step with greedy sampling."""
        self._recorder.launches = []
        num_rows = len(batch.logits_indices)
        with torch.inference_mode(), intercepted_launches(self._target, self._recorder.record):
            arrays = self._lay_out(batch)
            layout_seconds = min(_seconds(lambda: self._lay_out(batch)) for _ in range(_TIMED))
            tokens, layout, plan = ([torch.from_numpy(array).to(META) for array in group] for group in arrays)
            inputs = forward_inputs(batch, tokens, layout, plan)
            logits = torch.empty((num_rows, self.limits.vocab_size), device=META)
            sampled = torch.empty(num_rows, dtype=torch.int64, device=META)
            launch_seconds = min(_seconds(lambda: self._launch(inputs, sampled, logits)) for _ in range(_TIMED))
            with self._recorder:
                self._recorder.launches = []
                self._launch(inputs, sampled, logits)
        return StepTrace(tuple(self._recorder.launches), layout_seconds, launch_seconds)

    def _lay_out(self, batch: Batch) -> tuple[Sequence[Any], ...]:
        return token_arrays(batch), layout_arrays(batch), self._forward.attention.plan(batch, count_single(batch))

    def _launch(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        self._forward(inputs, sampled, logits)
        sample_greedy(logits, sampled)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def step_of(lengths: Sequence[tuple[int, int]]) -> Batch:
    """A step of sequences of so many tokens, at the end of contexts of so many. All sample."""
    chunks, next_block = [], 0
    for num_tokens, context in lengths:
        pages = -(-context // BLOCK_SIZE)
        blocks = np.arange(next_block, next_block + pages, dtype=np.int32)
        next_block += pages
        start = context - num_tokens
        chunks.append(SequenceChunk(np.zeros(num_tokens, np.int32), start, blocks, start, True))
    return make_batch(chunks, BLOCK_SIZE)
