"""A Llama of any size with random weights, made on the device, and a worker's runner over it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from worker_svc.attention import AttentionKind
from worker_svc.block_copier import RateLimiter
from worker_svc.block_copier_factory import make_block_copier
from worker_svc.cache import CacheShape
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.loading import LoadedModel
from worker_svc.model.torch_model import TorchModel
from worker_svc.model.triton_model import TritonModel
from worker_svc.model.weights import Checkpoint
from worker_svc.runner import Runner

# The shape of Llama 3 8B
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
# The same architecture, small enough for Triton's interpreter
TINY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class RandomCheckpoint(Checkpoint):
    """A checkpoint with every tensor that is read. `num_bytes` is their size without the embedding, of which a step
    reads a row for each token."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(Path(), DenseFormat(), dtype, device, files=())
        self._generator = torch.Generator(device).manual_seed(0)
        self.num_bytes = 0

    def read(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if "norm" in name:
            tensor.fill_(1)
        else:
            tensor.normal_(0, 0.02, generator=self._generator)
        if "embed" not in name:
            self.num_bytes += tensor.nbytes
        return tensor


class MetaCheckpoint(Checkpoint):
    """A checkpoint with every tensor in bfloat16, without values; `num_bytes` as above."""

    def __init__(self) -> None:
        super().__init__(Path(), DenseFormat(), torch.bfloat16, torch.device("meta"), files=())
        self.num_bytes = 0

    def read(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if "embed" not in name:
            self.num_bytes += tensor.nbytes
        return tensor

    def numbers(self, name: str, *shape: int) -> Tensor:
        """One number alone is an argument of kernels, and has a value."""
        return torch.full(shape, 0.5) if shape == (1,) else super().numbers(name, *shape)


class RandomModel:
    """A model of a config.json's content, by Triton's kernels or torch's. `weight_bytes` are read by each step."""

    def __init__(self, raw: dict[str, Any], dtype: torch.dtype, device: torch.device, kind: AttentionKind) -> None:
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(raw))
            description = describe(read_config(Path(folder)))
        if description is None:
            raise ValueError("the native modules do not compute this model")
        self.layout, self.dtype, self.device = description.layout, dtype, device
        checkpoint = RandomCheckpoint(dtype, device)
        with torch.inference_mode():
            model_type = TritonModel if kind is AttentionKind.TRITON else TorchModel
            self._model: LoadedModel = model_type(description, checkpoint)
        self.weight_bytes = checkpoint.num_bytes

    def make_runner(self, block_size: int, num_blocks: int, max_step_tokens: int, max_sequences: int) -> Runner:
        """A worker's runner over a new cache; with Triton's kernels, with CUDA graphs."""
        layout = self.layout
        shape = CacheShape.of(layout, block_size, self.dtype)
        cache, host_blocks = shape.allocate(num_blocks, self.device), shape.allocate_host(0)
        limits = WorkerLimits(
            layout.vocab_size, layout.context_length, block_size, num_blocks, max_step_tokens, max_sequences
        )
        executor = self._model.executor(cache, limits, CudaGraphOptions())
        return Runner(executor, limits, make_block_copier(executor, cache, host_blocks, RateLimiter(None)))
