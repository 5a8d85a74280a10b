"""Settings of the worker."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from svc_common.settings import ServiceSettings


class WorkerSettings(ServiceSettings):
    """What a worker is told."""

    model_config = SettingsConfigDict(cli_prog_name="python -m worker_svc")

    worker_port: int = Field(50053, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    worker_metrics_port: int = Field(9102, ge=0, le=65535, description="port of /metrics; 0 takes a free one")
    model: str | None = Field(None, description="model directory, GGUF file or hub id; else smollm2-135m-instruct")
    revision: str | None = Field(None, description="branch, tag or commit of the model's hub id; absent: main")
    tokenizer: str | None = Field(
        None, description="directory or hub id of another tokenizer than the model's own, the same for all roles"
    )
    tokenizer_revision: str | None = Field(
        None,
        description="branch, tag or commit of the tokenizer's hub id; absent: main, or the model's revision where the "
        "tokenizer is the model's",
    )
    max_model_len: int | None = Field(
        None, ge=3, description="most tokens of a sequence, prompt and output together; else the model's context length"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="what the model computes in; auto is bfloat16 where the device has it, else float32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where it runs; auto is a GPU if there is one")
    kernels: Literal["auto", "triton", "compiled", "torch"] = Field(
        "auto",
        description="what computes: auto is triton on a GPU; on a processor it is compiled, where the model fits it "
        "and a C++ compiler is found, else torch",
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8 keeps weights in 8 bits, with a scale for each output; for compiled kernels"
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        description="what keys and values are kept in: auto is what the model computes in; fp8 and int8, for triton "
        "kernels, are 8 bits with a scale for each vector",
    )
    cuda_graphs: bool = Field(True, description="capture steps of decodes as CUDA graphs at start, on a GPU")
    block_size: int = Field(16, ge=8, le=128, description="tokens in one block of keys and values")
    num_blocks: int | None = Field(None, ge=1, description="number of blocks; else what memory allows")
    max_step_tokens: int | None = Field(
        None, ge=1, description="the most tokens that one step computes; else 2048 on a GPU, 256 on a processor"
    )
    max_sequences: int | None = Field(
        None, ge=1, description="the most sequences that one step holds; else 256 on a GPU, 64 on a processor"
    )
    memory_fraction: float | None = Field(
        None, gt=0, le=1, description="share of the GPU to use, else 0.9; or of available memory, else 0.4"
    )
    cpu_kv_bytes: int = Field(4 * 2**30, ge=1, description="the most memory for keys and values on a processor")
    swap_space: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="GiB of the host's memory for blocks that are swapped out, 0 for none; else as much as the blocks "
        "themselves take, at most 16, and a quarter of what is left",
    )
    swap_rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="bytes that swaps move in a second at most; else all they can"
    )
    drain_grace: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds after SIGTERM in which the scheduler may end or move what runs here",
    )
    deterministic: bool = Field(
        False,
        description="tokens and log-probabilities to the last bit the same whatever else is in a step, and however a "
        "sequence is cut into steps; a worker that cannot promise it does not start",
    )
    num_threads: int | None = Field(None, ge=1, le=1024, description="threads of a forward pass; else one a processor")
