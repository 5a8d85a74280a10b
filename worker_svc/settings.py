"""Settings of the worker."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from svc_common.model_settings import SERVED_MODEL_NAME, TASK, ServedModelNames, TaskChoice
from svc_common.models import ServedModel, resolve_model, split_names
from svc_common.settings import EMPTY_IS_UNSET, InnerSettings, OptionalPath


class WorkerSettings(InnerSettings):
    """Settings of a worker. Each is a flag and a variable: --num-blocks and QUIRE_NUM_BLOCKS."""

    model_config = SettingsConfigDict(cli_prog_name="python -m worker_svc")

    worker_port: int = Field(50053, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    worker_metrics_port: int = Field(9102, ge=0, le=65535, description="port of /metrics; 0 takes a free one")
    model: str | None = Field(None, description="model directory, GGUF file or hub id; unset: SmolLM2-135M-Instruct")
    revision: str | None = Field(None, description="branch, tag or commit of the model's hub id; unset: main")
    tokenizer: str | None = Field(
        None,
        description="directory or hub id of a tokenizer that replaces the model's; the same for gateways and workers",
    )
    tokenizer_revision: str | None = Field(
        None,
        description="branch, tag or commit of the tokenizer's hub id; unset: main, or the model's revision if the "
        "tokenizer is the model's",
    )
    served_model_name: ServedModelNames | None = Field(None, description=SERVED_MODEL_NAME)
    task: TaskChoice = Field("auto", description=TASK)
    max_model_len: Annotated[int | None, EMPTY_IS_UNSET] = Field(
        None, ge=3, description="tokens of a sequence, prompt and output together; unset: the model's context length"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="data type of the computation; auto: on a GPU bfloat16, or float16 where the GPU has no bfloat16; "
        "on a CPU bfloat16 where that is fast, else float32",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device of the model; auto: a GPU if there is one"
    )
    kernels: Literal["auto", "triton", "compiled", "torch"] = Field(
        "auto",
        description="kernels of the model; auto: triton on a GPU; on a CPU compiled, if they support the model and a "
        "C++ compiler is found, else torch",
    )
    attention_backend: str = Field(
        "triton",
        description="attention on a GPU: triton, which are Quire's kernels, or the name of "
        "an entry point quire.attention_backends of an installed package",
    )
    kernel_cache_dir: OptionalPath = Field(
        None, description="writable directory of compiled CPU kernels; unset: `kernels` in QUIRE_CACHE_DIR"
    )
    quantization: Annotated[
        Literal["none", "int8", "w8a16", "w8a8", "w4a16", "w4a8", "fp8"],
        AfterValidator(lambda name: "int8" if name == "w8a16" else name),
    ] = Field(
        "none",
        description="weights of native models; int8, also called w8a16: 8 bits with a scale for each output; w4a16: 4 "
        "bits with a scale and a zero point for each group of inputs; w8a8: activations in 8 bits too; w4a8, on a CPU: "
        "weights in 4 bits and activations in 8; fp8, on a GPU from compute capability 8.9 on: both in float8_e4m3fn; "
        "not with QUIRE_KERNELS=torch; on a GPU encoders stay in their dtype",
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        description="data type of keys and values; auto: as the computation; int8, and on a GPU fp8: 8 bits with "
        "a scale for each vector; not with QUIRE_KERNELS=torch",
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture steps of up to 512 tokens as CUDA graphs")
    block_size: int = Field(16, ge=8, le=128, description="tokens in one KV block")
    num_blocks: int | None = Field(None, ge=1, description="number of KV blocks; unset: what memory allows")
    max_step_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens that one step may compute; unset: 2048 on a GPU; on a CPU 256, 128 while at least as "
        "many sequences decode as wait for their prompts, and up to 512 beside decodes that take long",
    )
    max_sequences: int | None = Field(
        None,
        ge=1,
        description="sequences that one step may hold; unset: 256 on a GPU; on a CPU one for each "
        "2,048 tokens of KV memory, from 64 to 256",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the memory to use; unset: 0.9 of a GPU's, 0.4 of the available memory on a CPU",
    )
    cpu_kv_bytes: int = Field(4 * 2**30, ge=1, description="limit of KV memory on a CPU, in bytes")
    swap_space: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="GiB of host memory for swapped blocks; 0: none; unset: the size of the KV memory, at most 16 "
        "and at most a quarter of the memory that is left",
    )
    memory_limit: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="GiB of memory that the worker's process may use; unset: the limit of its container, or the "
        "memory of the machine",
    )
    memory_high: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of that memory from which on it counts as short: no sequence is admitted beside others, "
        "and prompts get half of a step's tokens",
    )
    memory_critical: float = Field(
        0.95,
        gt=0,
        le=1,
        description="share of that memory from which on, on a CPU, blocks of sequences that wait and of the prefix "
        "cache are freed, and sequences are preempted; above QUIRE_MEMORY_HIGH",
    )
    swap_rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="limit of swaps in bytes per second; unset: no limit"
    )
    drain_grace: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds after SIGTERM in which the scheduler may end or move running sequences",
    )
    deterministic: bool = Field(
        False,
        description="tokens and log-probabilities do not depend on the batch or on how a sequence is split, to "
        "the last bit; a worker that cannot guarantee it does not start",
    )
    drafter: str = Field(
        "none",
        description="speculative decoding: none, ngram (what followed the same tokens earlier in the sequence), "
        "or the name of an entry point quire.drafters of an installed package",
    )
    max_draft_tokens: int = Field(
        4, ge=1, le=128, description="tokens that the drafter may guess for a sequence in one step"
    )
    num_threads: int | None = Field(None, ge=1, le=1024, description="threads of a forward pass; unset: one per CPU")
    profile_dir: OptionalPath = Field(
        None, description="directory for traces of profiles that an operator starts; unset: profiles are refused"
    )

    @model_validator(mode="after")
    def _critical_is_above_high(self) -> Self:
        if self.memory_critical <= self.memory_high:
            raise ValueError(
                f"QUIRE_MEMORY_CRITICAL is {self.memory_critical:g}, which is not above QUIRE_MEMORY_HIGH, "
                f"{self.memory_high:g}"
            )
        return self

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes that the process may use; None: what its container or the machine has."""
        return None if self.memory_limit is None else int(self.memory_limit * 2**30)

    def served_model(self) -> ServedModel:
        """The model's files and names. Raises ModelNotFound."""
        names = split_names(self.served_model_name or "")
        return resolve_model(self.model, self.revision, self.tokenizer, self.tokenizer_revision, names)
