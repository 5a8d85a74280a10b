"""What `quire serve` does with each flag of `vllm serve` of vLLM 0.32 and 0.33. docs/from-vllm.md is made from it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from svc_common.supervisor.vllm_flags import (
    Always,
    ApiKeys,
    Choice,
    FlagFile,
    JsonFields,
    JsonObject,
    NoEffect,
    Only,
    Refused,
    Switch,
    Value,
    Values,
    VllmFlag,
)
from svc_common.supervisor.vllm_values import OneOf, origins, size, size_or_unset, up_to

_DTYPES = {name: name for name in ("auto", "float32", "bfloat16", "float16")} | {"float": "float32", "half": "float16"}
_KV_DTYPES = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "int8": "int8"}
_LEVELS = {"trace": "debug", "debug": "debug", "info": "info", "warning": "warning", "error": "error"}

# Parsers whose models write a format that has another name here.
_TOOL_PARSERS = {
    "openai": "harmony",
    "glm47": "glm45",
    "qwen3_xml": "qwen3_coder",
    **dict.fromkeys(("mimo", "step3p5"), "qwen3_coder"),
    **dict.fromkeys(("granite4", "ernie45"), "hermes"),
    "cohere_command3": "cohere",
    "jamba": "hunyuan_a13b",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
_REASONING_PARSERS = {
    "openai_gptoss": "harmony",
    "ernie45": "granite",
    "cohere_command3": "cohere",
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo"), "think"),
    **dict.fromkeys(("minimax_m2", "nemotron_v3", "olmo3", "qwen3", "step3p5"), "think"),
}


def _names(parsers: Mapping[str, str]) -> str:
    """What other names of parsers stand for."""
    by_format: dict[str, list[str]] = {}
    for parser, name in parsers.items():
        by_format.setdefault(name, []).append(f"`{parser}`")
    groups = ((", ".join(names), "is" if len(names) == 1 else "are", name) for name, names in by_format.items())
    return "; ".join(f"{names} {verb} `{name}`" for names, verb, name in groups)


SERVED: tuple[VllmFlag, ...] = (
    FlagFile(
        "--config", "a YAML file with flags without dashes, such as `max-model-len: 4096`; those of the command win"
    ),
    # The model.
    Value("--model", "QUIRE_MODEL", "also as the argument MODEL; a hub id, a model directory or a GGUF file"),
    Values("--served-model-name", "QUIRE_SERVED_MODEL_NAME", "the name, then aliases"),
    Value("--revision", "QUIRE_REVISION"),
    Value("--tokenizer", "QUIRE_TOKENIZER"),
    Value("--tokenizer-revision", "QUIRE_TOKENIZER_REVISION"),
    Value("--hf-token", "HF_TOKEN"),
    Value("--download-dir", "HF_HUB_CACHE"),
    Value("--dtype", "QUIRE_DTYPE", "`half` is `float16`, `float` is `float32`", OneOf(_DTYPES)),
    Value(
        "--max-model-len",
        "QUIRE_MAX_MODEL_LEN",
        "`auto` and -1 leave it unset: the model's context length",
        size_or_unset,
    ),
    Choice(
        "--runner",
        "QUIRE_TASK",
        {"auto": None, "generate": "generate", "pooling": "pooling"},
        "its names; encoders, cross-encoders and classifiers compute their values without it",
    ),
    Choice(
        "--convert",
        "QUIRE_TASK",
        {"auto": None, "none": None, "embed": "embed", "classify": "pooling"},
        "`embed`, and with `classify` `pooling`: a model with a head for labels classifies",
    ),
    Value(
        "--generation-config",
        "QUIRE_GENERATION_CONFIG",
        "`vllm` is `quire`",
        OneOf({"vllm": "quire"}, others=True),
    ),
    JsonObject("--override-generation-config", "QUIRE_OVERRIDE_GENERATION_CONFIG"),
    Value("--chat-template", "QUIRE_CHAT_TEMPLATE"),
    JsonObject("--default-chat-template-kwargs", "QUIRE_CHAT_TEMPLATE_KWARGS"),
    Value(
        "--tool-call-parser",
        "QUIRE_TOOL_FORMAT",
        f"its names, and: {_names(_TOOL_PARSERS)}. Unset: as the chat template shows it",
        OneOf(_TOOL_PARSERS, others=True),
    ),
    Value(
        "--reasoning-parser",
        "QUIRE_REASONING_FORMAT",
        f"its names, and: {_names(_REASONING_PARSERS)}. Unset: as the chat template shows it",
        OneOf(_REASONING_PARSERS, others=True),
    ),
    # Clients.
    Value("--host", "QUIRE_HOST", "unset: 127.0.0.1, where vLLM listens on all addresses"),
    Value("--port", "QUIRE_HTTP_PORT"),
    Value("--grpc-port", "QUIRE_GRPC_PORT"),
    Value("--uds", "QUIRE_UDS", "in place of --port; gRPC has its port"),
    ApiKeys("--api-key"),
    Value("--ssl-certfile", "QUIRE_TLS_CERT_FILE", "for both protocols; read again when it changes"),
    Value("--ssl-keyfile", "QUIRE_TLS_KEY_FILE", "for both protocols; read again when it changes"),
    Value("--root-path", "QUIRE_ROOT_PATH"),
    Switch("--enable-force-include-usage", "QUIRE_STREAM_USAGE", on="1", off="0"),
    Switch("--return-tokens-as-token-ids", "QUIRE_TOKENS_AS_TOKEN_IDS", on="1", off="0"),
    Value("--allowed-origins", "QUIRE_CORS_ORIGINS", "", origins),
    Value("--max-logprobs", "QUIRE_MAX_LOGPROBS", "0 to 128; -1, the whole vocabulary, is refused", up_to(128)),
    Value("--seed", "QUIRE_SEED", "unset: seeds of requests without one are random, where vLLM takes 0"),
    # Memory and steps.
    Value("--gpu-memory-utilization", "QUIRE_MEMORY_FRACTION", aliases=("--device-memory-utilization",)),
    Value("--block-size", "QUIRE_BLOCK_SIZE"),
    Value("--num-gpu-blocks-override", "QUIRE_NUM_BLOCKS"),
    Value("--kv-cache-dtype", "QUIRE_KV_CACHE_DTYPE", "`fp8_e4m3` is `fp8`", OneOf(_KV_DTYPES)),
    Value("--kv-offloading-size", "QUIRE_SWAP_SPACE", "GiB"),
    Value("--swap-space", "QUIRE_SWAP_SPACE", "GiB; a flag of earlier releases of vLLM"),
    Value("--max-num-seqs", "QUIRE_MAX_SEQUENCES", "", size),
    Value("--max-num-batched-tokens", "QUIRE_MAX_STEP_TOKENS", "", size),
    Value("--max-num-queued-reqs", "QUIRE_MAX_QUEUED_REQUESTS", "", size),
    Value("--max-num-queued-tokens", "QUIRE_MAX_QUEUED_TOKENS", "", size),
    Value(
        "--scheduling-policy",
        "QUIRE_POLICY",
        "unset: `fair`. A higher `priority` goes first, where in vLLM a lower one does",
        OneOf({"fcfs": "fcfs", "priority": "priority", "fair": "fair"}),
    ),
    Switch("--enforce-eager", "QUIRE_CUDA_GRAPHS", on="0", off="1"),
    Value("--device", "QUIRE_DEVICE", "a flag of earlier releases of vLLM"),
    JsonFields(
        "--speculative-config",
        {"num_speculative_tokens": "QUIRE_MAX_DRAFT_TOKENS"},
        {"method": ("ngram",)},
        {"QUIRE_DRAFTER": "ngram"},
        ("prompt_lookup_min", "prompt_lookup_max"),
        aliases=("-sc",),
    ),
    Value("--spec-method", "QUIRE_DRAFTER", "", OneOf({"ngram": "ngram"})),
    Value("--spec-tokens", "QUIRE_MAX_DRAFT_TOKENS", "", size),
    # Operations.
    Value("--log-level", "QUIRE_LOG_LEVEL", "`trace` is `debug`; unset: `warning`", OneOf(_LEVELS)),
    Value("--uvicorn-log-level", "QUIRE_LOG_LEVEL", "`trace` is `debug`; unset: `warning`", OneOf(_LEVELS)),
    Value("--otlp-traces-endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTLP over gRPC"),
    JsonFields("--profiler-config", {"torch_profiler_dir": "QUIRE_PROFILE_DIR"}, {"profiler": ("torch",)}),
    Value("--shutdown-timeout", "QUIRE_DRAIN_GRACE", "unset: 30 s"),
)
"""Flags that set variables."""

ACCEPTED: tuple[VllmFlag, ...] = (
    # These three change no answer, so their --no- forms are accepted, too.
    NoEffect("--enable-prefix-caching", "the prefix cache is always on; a tenant finds only its own prefixes"),
    NoEffect("--enable-chunked-prefill", "prompts are always chunked"),
    NoEffect("--async-scheduling", "the next step is always planned while one runs"),
    Always("--enable-auto-tool-choice", "a request's `tool_choice` decides"),
    Always("--exclude-tools-when-tool-choice-none", "with `none` the prompt has no tools"),
    Always("--enable-prompt-tokens-details", "`usage` always has them"),
    Always("--enable-request-id-headers", "answers always have `x-request-id`"),
    Always("--enable-tokenizer-info-endpoint", "`/tokenizer_info` is always served"),
    Always("--enable-ssl-refresh", "TLS files are always read again"),
    Always("--grpc", "gRPC is always served, beside HTTP"),
    # Any backend allows the same outputs.
    JsonFields("--structured-outputs-config", {}, ignored=("backend",)),
    NoEffect("--guided-decoding-backend", "constraints are always checked by llguidance", has_value=True),
    NoEffect("--language-model-only", "only text is served"),
    NoEffect("--use-tqdm-on-load", "progress is a line on stderr"),
    NoEffect("--disable-log-stats", "statistics are metrics, not lines of the log"),
    NoEffect("--aggregate-engine-logging", "statistics are metrics, not lines of the log"),
    NoEffect("--disable-uvicorn-access-log", "there is no access log"),
    NoEffect("--disable-access-log-for-endpoints", "there is no access log", has_value=True),
    NoEffect("--disable-log-requests", "requests are not logged; a flag of earlier releases of vLLM"),
    NoEffect("--max-log-len", "prompts are not logged", has_value=True),
    NoEffect("--enable-log-deltas", "outputs are not logged"),
    NoEffect(
        "--trust-remote-code", "code of models is not run; other architectures than docs/design/models.md are refused"
    ),
    NoEffect("--max-parallel-loading-workers", "each worker loads its own weights", has_value=True),
    Only("--tokenizer-mode", ("auto", "hf"), "the tokenizer is tokenizer.json"),
    Only("--config-format", ("auto", "hf"), "the configuration is config.json"),
    Only("--load-format", ("auto", "safetensors"), "weights are safetensors, or a GGUF file that MODEL names"),
    Only("--model-impl", ("auto",), "the architecture decides between Quire's kernels and transformers"),
    Only("--logprobs-mode", ("raw_logprobs",), "log-probabilities are those before penalties and temperature"),
    Only("--chat-template-content-format", ("auto",), "the template decides"),
    Only("--response-role", ("assistant",), "the template decides"),
    Only("--stream-interval", ("1",), "each step's tokens are sent at once"),
    Only("--tensor-parallel-size", ("1",), "a model uses one GPU", aliases=("-tp",)),
    Only("--pipeline-parallel-size", ("1",), "a model uses one GPU", aliases=("-pp",)),
    Only(
        "--data-parallel-size",
        ("1",),
        "use --workers N on CPUs; on several GPUs start one worker for each, with CUDA_VISIBLE_DEVICES, and list them "
        "in QUIRE_WORKERS_AT",
        aliases=("-dp",),
    ),
    Only("--distributed-executor-backend", ("uni", "mp"), "each worker is a process"),
    Only("--nnodes", ("1",), "workers on other machines are started one by one (docs/operations.md)", aliases=("-n",)),
)
"""Flags that change nothing here."""

_REFUSED: dict[str, str] = {
    "start gateways and schedulers without workers one by one (docs/operations.md)": "--headless",
    "use --gateways N: each has a port of its own": "--api-server-count -asc",
    "workers are listed in QUIRE_WORKERS_AT, and any gateway serves all of them": (
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local -dpl "
        "--data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb "
        "--[no-]data-parallel-hybrid-lb -dph --[no-]data-parallel-external-lb -dpe "
        "--data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port --dp-supervisor-probe-interval-s "
        "--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold --dp-sync-interval "
        "--[no-]disable-nccl-for-dp-synchronization"
    ),
    "a model uses one GPU": (
        "--master-addr --master-port --node-rank -r --distributed-timeout-seconds --cpu-distributed-timeout-seconds "
        "--decode-context-parallel-size -dcp --dcp-comm-backend --[no-]dcp-q-replicate --dcp-kv-cache-interleave-size "
        "--cp-kv-cache-interleave-size --prefill-context-parallel-size -pcp --[no-]enable-hc-sp "
        "--[no-]enable-expert-parallel -ep --[no-]enable-ep-weight-filter --all2all-backend --[no-]enable-dbo "
        "--ubatch-size --[no-]enable-elastic-ep --elastic-ep-max-dp-size --dbo-decode-token-threshold "
        "--dbo-prefill-token-threshold --[no-]enable-eplb --eplb-config --expert-placement-strategy "
        "--[no-]ray-workers-use-nsight --[no-]disable-custom-all-reduce --[no-]enable-batch-sharded-sampling "
        "--[no-]enable-nccl-comm-suspend --[no-]enable-shm-tensor-arena"
    ),
    "a worker that fails is always replaced (docs/guarantees.md)": (
        "--[no-]enable-fault-tolerance --fault-tolerance-config --watchdog-config"
    ),
    "set CUDA_VISIBLE_DEVICES, or bind the worker's process with taskset or numactl": (
        "--device-ids --[no-]numa-bind --numa-bind-nodes --numa-bind-cpus"
    ),
    "code of models is not run; the architecture must be one of docs/design/models.md": (
        "--code-revision --model-class-overrides"
    ),
    "an installed package can add policies, drafters and architectures (docs/design/extending.md)": (
        "--worker-cls --worker-extension-cls --scheduler-cls --logits-processors --io-processor-plugin --middleware "
        "--tool-parser-plugin --reasoning-parser-plugin"
    ),
    "edit a copy of the model's config.json": "--hf-overrides --hf-config-path --[no-]disable-sliding-window",
    (
        "quantized checkpoints are recognised by a model's config.json, and GGUF by its file; "
        "QUIRE_QUANTIZATION computes weights in 8 bits (int8) or 4 (w4a16), and activations in 8 bits too (w8a8; w4a8 "
        "on a CPU, fp8 on a GPU)"
    ): ("--quantization -q --quantization-config --[no-]allow-deprecated-quantization"),
    "give `seed` in requests; a request without one draws its own": "--[no-]use-fp64-gumbel",
    "set QUIRE_NUM_BLOCKS, or on a CPU QUIRE_CPU_KV_BYTES": "--kv-cache-memory-bytes",
    "weights stay on the device; KV blocks are swapped by QUIRE_SWAP_SPACE": (
        "--offload-backend --cpu-offload-gb --cpu-offload-params --offload-group-size --offload-num-in-group "
        "--offload-prefetch-step --offload-params --kv-offloading-backend"
    ),
    "prefixes are known by SHA-256 and verified token by token": (
        "--prefix-caching-hash-algo --prefix-cache-retention-interval --prefix-match-unit"
    ),
    "QUIRE_GAP_FACTOR bounds how much a long prompt slows running streams, unless it is late (docs/policies.md)": (
        "--long-prefill-token-threshold --[no-]long-prefill-token-threshold-adaptive --prefill-schedule-interval "
        "--max-num-scheduled-tokens --max-num-active-seqs --[no-]scheduler-reserve-full-isl"
    ),
    "adapters are not served": (
        "--lora-modules --[no-]enable-lora --max-loras --max-lora-rank --lora-dtype --max-cpu-loras "
        "--[no-]fully-sharded-loras --lora-target-modules --default-mm-loras --[no-]specialize-active-lora "
        "--[no-]enable-tower-connector-lora --[no-]enable-mixed-moe-lora-format --[no-]enable-moe-shared-loras "
        "--max-lora-cls-labels"
    ),
    "only text is served": (
        "--allowed-local-media-path --allowed-media-domains --limit-mm-per-prompt "
        "--[no-]enable-mm-embeds --media-io-kwargs --mm-processor-kwargs --mm-processor-cache-gb "
        "--mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --[no-]mm-encoder-only "
        "--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path "
        "--mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --[no-]interleave-mm-strings "
        "--[no-]skip-mm-profiling --video-pruning-rate --video-pruning-method --mm-tensor-ipc --mm-processor-device "
        "--mm-ipc-gpu-memory-gb --[no-]mm-device-do-normalize --[no-]disable-chunked-mm-input "
        "--[no-]trust-request-mm-kwargs --ec-transfer-config --ec-manager-config --[no-]enable-prompt-embeds"
    ),
    "requests for embeddings have `pooling`; vectors of single tokens and diffusion are not served": (
        "--pooler-config --[no-]enable-flash-late-interaction --diffusion-config -dc"
    ),
    "QUIRE_KERNELS chooses between Quire's kernels, QUIRE_ATTENTION_BACKEND the attention of a GPU": (
        "--attention-backend --attention-config -ac --moe-backend --linear-backend --sparse-indexer-topk-backend "
        "--kernel-config --ir-op-priority --[no-]enable-flashinfer-autotune --[no-]disable-cascade-attn "
        "--compilation-config -cc --optimization-level -O --cudagraph-capture-sizes --max-cudagraph-capture-size "
        "--performance-mode --gdn-prefill-backend --kda-prefill-backend --kda-decode-backend --jit-monitor-mode "
        "--[no-]jit-monitor-verbose --monokernel"
    ),
    "architectures with other state than keys and values are not served": (
        "--mamba-backend --mamba-ssu-algorithm --[no-]enable-mamba-cache-stochastic-rounding "
        "--mamba-cache-philox-rounds --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode "
        "--[no-]enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len --[no-]use-replayssm "
        "--[no-]swa-bounded-replay --[no-]kv-sharing-fast-prefill --kv-cache-dtype-skip-layers "
        "--[no-]disable-hybrid-kv-cache-manager --engram-config"
    ),
    "the only drafter is ngram: --spec-method ngram": "--spec-model",
    "send `chat_template_kwargs` or `reasoning_effort` in requests": (
        "--reasoning-config --reasoning-effort-map --anthropic-disabled-thinking-effort"
    ),
    "requests cannot bring a template": "--[no-]trust-request-chat-template",
    "define tools in requests; `strict` constrains their arguments": "--tool-strict-level --tool-server",
    "a stream without events sends a comment every 15 s; the interval is fixed": "--sse-keep-alive-interval",
    "neither prompts nor outputs are logged; traces have a span for each request": (
        "--[no-]enable-log-requests --[no-]enable-log-outputs --[no-]log-error-stack "
        "--[no-]enable-logging-iteration-details"
    ),
    "logs are JSON lines on stderr; QUIRE_LOG_LEVEL is their level": "--logging-config --log-config-file",
    "metrics and traces are described in docs/operations.md": (
        "--show-hidden-metrics-for-version --collect-detailed-traces --per-request-spec-decode-metrics "
        "--[no-]kv-cache-metrics --kv-cache-metrics-sample --custom-histogram-buckets --[no-]cudagraph-metrics "
        "--[no-]enable-layerwise-nvtx-tracing --[no-]enable-mfu-metrics --[no-]enable-per-request-metrics "
        "--[no-]enable-server-load-tracking"
    ),
    "put a proxy in front": (
        "--ssl-ciphers --ssl-ca-certs --ssl-cert-reqs --allow-credentials --allowed-methods "
        "--allowed-headers --h11-max-incomplete-event-size --h11-max-header-count --[no-]disable-fastapi-docs "
        "--[no-]enable-offline-docs"
    ),
    "outputs have no watermark": "--watermark --watermark-config",
    "Quire has no such feature": (
        "--[no-]skip-tokenizer-init --[no-]tokens-only --[no-]enable-scale-out --fingerprint-mode "
        "--fingerprint-value --[no-]cohere-is-reasoning-model --cohere-format --[no-]enable-return-routed-experts "
        "--[no-]return-sampling-mask --[no-]enable-trace-replay --[no-]enable-sleep-mode --sleep-mode-backend "
        "--[no-]sleep-mode-offload-cudagraph "
        "--sleep-preserve-parameter-names --[no-]enable-cumem-allocator --renderer-num-workers "
        "--kv-transfer-config --kv-events-config --additional-config --aux-output-config --weight-transfer-config "
        "--[no-]fail-on-environ-validation"
    ),
    "weights are read from safetensors": (
        "--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--model-loader-extra-config --ignore-patterns --pt-load-map-location"
    ),
}
"""Names of flags that are not served, with their short ones after them, by what to use instead. Those with [no-] are
switches: --no-NAME asks for nothing.
"""

_SWITCH = "--[no-]"


def _refused() -> Iterator[Refused]:
    for instead, names in _REFUSED.items():
        flag: Refused | None = None
        for name in names.split():
            if name.startswith("--"):
                if flag is not None:
                    yield flag
                flag = Refused(name.replace(_SWITCH, "--"), instead, is_switch=name.startswith(_SWITCH))
            else:
                assert flag is not None, "a short name follows a long one"
                flag = replace(flag, aliases=(*flag.aliases, name))
        assert flag is not None
        yield flag


REFUSED: tuple[Refused, ...] = tuple(_refused())
"""Flags that are not served."""

FLAGS: tuple[VllmFlag, ...] = (*SERVED, *ACCEPTED, *REFUSED)
