"""Which kernels would be compiled while a worker serves: the real runner and executor, on meta tensors.

    python -m benchmarks.aot.serving [--model llama|qwen3_moe|gemma2|gemma4_text|deepseek_v2|all] [--steps 300]
                                     [--kv fp8|int8] [--quantization int8|w8a8|w4a16|fp8] [--deterministic]
                                     [--no-graphs]

Start-up and then random steps run as they would on an H200, but a launch is only recorded. Fails with status 1 if a
launch after the start-up needs a kernel that none before it needed; the kernels are printed. `all` are all registered
families: decoders, also where they compute embeddings, and encoders; and a model of transformers' own modules. With
`--quantization` they are the decoders alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.aot.encoding import compiled_while_encoding
from benchmarks.aot.families import encoder_descriptions, family_configs
from benchmarks.aot.launches import Launches
from benchmarks.aot.targets import TARGETS, intercepted_launches
from benchmarks.aot.traffic import RandomDrafter, RandomTraffic, letter_grammars
from benchmarks.gpu.random_model import LLAMA_8B, MetaCheckpoint
from quire_kernels.block_copy import block_copy
from worker_svc.cache import CacheShape, KVCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor, run_inline
from worker_svc.gpu import executor as gpu_executor
from worker_svc.gpu.device_attention import DEFAULT_BACKEND
from worker_svc.gpu.staging import Staging, StagingBuffer
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.model.loading import LoadedModel
from worker_svc.model.triton_encoder import TritonEncoder, unsupported_reason
from worker_svc.model.triton_model import TritonModel
from worker_svc.model.triton_states import TritonStates
from worker_svc.model_layout import ModelLayout
from worker_svc.runner import Runner
from worker_svc.step import BlockPairs, Direction, SwapResult
from worker_svc.warm_up import measure_prefill, run_largest_step, warm_up

_META = torch.device("meta")
_TWO_LAYERS = LLAMA_8B | {"num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _TWO_LAYERS,
    "qwen3_moe": _TWO_LAYERS
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    # Layers with and without a window, whose decodes have a plan each
    "gemma2": _TWO_LAYERS
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 3584,
        "num_attention_heads": 16,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    # Layers of different heads, of which the last one reads the keys and values of another, and vectors of layers
    "gemma4_text": _TWO_LAYERS
    | {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "vocab_size_per_layer_input": LLAMA_8B["vocab_size"],
        "rope_parameters": None,
        "final_logit_softcapping": 30.0,
    },
    "deepseek_v2": _TWO_LAYERS
    | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
}
ALL = "all"
_CACHE_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_MAX_DRAFT_TOKENS = 4


class _MetaStaging(Staging):
    """What comes back from the device is zero: the first token is sampled always."""

    def fetch(self, buffer: StagingBuffer, tensors: Sequence[Tensor], packed: Tensor | None = None) -> Tensor:
        return torch.zeros(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)

    def upload(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(_META)


class _MetaCopier:
    """Copies within the device; there are no blocks on the host."""

    is_synchronous = False

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[SwapResult]":
        raise NotImplementedError

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        return run_inline(lambda: block_copy(self._blocks, self._blocks, torch.tensor(pairs).to(_META)))

    def discard(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        pass

    def cancel_all(self) -> None:
        pass


def _describe(raw_config: dict[str, Any]) -> ModelDescription:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw_config))
        description = describe(read_config(Path(folder)))
    if description is None:
        raise ValueError("the native modules do not compute this model")
    return description


class _MetaModules:
    """A small model of transformers' own modules on meta tensors, with heads of Llama's size."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, PhiConfig

        from worker_svc.model.probe import probe
        from worker_svc.model.transformers_model import load_modules

        config = PhiConfig(
            hidden_size=1024, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=2048, max_position_embeddings=8192,
        )  # fmt: skip
        auto: Any = AutoModelForCausalLM
        with TemporaryDirectory() as folder:
            auto.from_config(config).save_pretrained(folder)
            load = partial(load_modules, config, Path(folder))
            self._found = probe(load(torch.float32, torch.device("cpu")))
            self._modules = load(torch.bfloat16, _META)

    @property
    def layout(self) -> ModelLayout:
        return self._found.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        from worker_svc.model.triton_transformers import make_device_executor

        return make_device_executor(self._modules, self._found, cache, limits, graphs, DEFAULT_BACKEND)


def compiled_while_serving(
    load: Callable[[], LoadedModel],
    num_steps: int,
    *,
    cache_dtype: torch.dtype = torch.bfloat16,
    cuda_graphs: bool = True,
) -> tuple[int, list[tuple[str, ...]]]:
    """How many launches the steps made, and the kernels among them that no launch of the start-up needed."""
    launches = Launches()
    with (
        torch.inference_mode(),
        patch.object(gpu_executor, "Staging", _MetaStaging),
        intercepted_launches(TARGETS["sm_90"], launches.record),
    ):
        model = load()
        grammars = letter_grammars(model.layout.vocab_size)
        shape = CacheShape.of(model.layout, 16, cache_dtype)

        def make_runner(limits: WorkerLimits) -> Runner:
            cache = shape.allocate(limits.num_blocks, _META)
            executor = model.executor(cache, limits, CudaGraphOptions(cuda_graphs))
            return Runner(executor, limits, _MetaCopier(cache.blocks), lambda: RandomDrafter(seed=1), grammars)

        layout = model.layout
        limits = WorkerLimits(
            layout.vocab_size, layout.context_length, 16, 40_000, 2048, 64, max_draft_tokens=_MAX_DRAFT_TOKENS
        )
        run_largest_step(limits, make_runner, "cuda")
        runner = make_runner(limits)
        warm_up(runner, "cuda")
        measure_prefill(runner)
        launches.take_new()
        num_before = launches.num_launches
        traffic = RandomTraffic(limits, seed=1)
        for _ in range(num_steps):
            traffic.note(runner.step(traffic.step()))
        return launches.num_launches - num_before, launches.take_new()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, ALL], default="llama")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kv", choices=_CACHE_DTYPES, default="bf16", help="data type of keys and values")
    parser.add_argument("--quantization", choices=list(Quantization), help="of weights; unset: their own data type")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-graphs", action="store_true", help="all steps are enqueued kernel by kernel")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is 1: the interpreter compiles nothing")
    models = family_configs(MODELS) if options.model == ALL else {options.model: MODELS[options.model]}
    num_bad = 0

    def results() -> Iterator[tuple[str, int, list[tuple[str, ...]]]]:
        quantization = options.quantization and Quantization(options.quantization)
        how = {"deterministic": options.deterministic}
        serving: dict[str, Any] = {
            "cache_dtype": _CACHE_DTYPES[options.kv],
            "cuda_graphs": not options.no_graphs,
        }
        for name, raw_config in models.items():
            load = partial(TritonModel, _describe(raw_config), MetaCheckpoint(), quantization=quantization, **how)
            yield name, *compiled_while_serving(load, options.steps, **serving)
        if options.model != ALL or quantization is not None:
            return
        if not options.deterministic:
            yield "modules of transformers", *compiled_while_serving(_MetaModules, options.steps, **serving)
        for name, raw_config in models.items():
            decoder = _describe(raw_config)
            make_states = partial(TritonStates, decoder, MetaCheckpoint(), **how)
            yield f"{name}, embeddings", *compiled_while_encoding(make_states, decoder.context_length, options.steps)
        for name, description in encoder_descriptions(MODELS).items():
            if unsupported_reason(description) is not None:
                continue
            make_encoder = partial(TritonEncoder, description, MetaCheckpoint(), **how)
            yield name, *compiled_while_encoding(make_encoder, description.context_length, options.steps)

    for name, num_launches, new in results():
        for kernel in new:
            print("compiled while serving:", *kernel)
        print(f"{name}: {options.steps} steps, {num_launches} launches, {len(new)} kernels compiled while serving")
        num_bad += bool(new) or not num_launches
    return 1 if num_bad or not models else 0


if __name__ == "__main__":
    sys.exit(main())
