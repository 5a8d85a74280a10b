"""Loads an encoder, or a decoder that serves as one, and warms it up: from settings to a runner ready for steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from svc_common.models import tokenizer_fingerprint, tokenizer_setting
from worker_svc.description import WorkerDescription, WorkerLimits, check_context_length
from worker_svc.encoder.backend import (
    KERNELS,
    EncoderBackend,
    check_quantized,
    choose_kernels,
    load_backend,
    quantization_of_values,
)
from worker_svc.encoder.pooling import EmbeddingDefaults, EmbeddingPooler, ScorePooler
from worker_svc.encoder.runner import EncoderRunner
from worker_svc.fingerprint import model_fingerprint
from worker_svc.host import available_cpus
from worker_svc.host_memory import available_memory
from worker_svc.instance import check_vocabulary, release_device
from worker_svc.kernel_choice import choose_device, choose_dtype
from worker_svc.memory_parts import MemoryAccount
from worker_svc.model.architecture import AnyDescription, is_decoder
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.embedding_layers import DenseLayer, load_layers, weights_of
from worker_svc.model.score_head import load_score_head
from worker_svc.model_fit import check_fits
from worker_svc.progress import progress
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, PromptComputation, SamplingParams, ScheduledSequence, Step
from worker_svc.warm_up import without_failures
from worker_svc.weight_sizes import read_value_sizes

# Tokens and sequences of a step. Others wait for the whole step, so it is short on a CPU.
_BUDGETS = {"cpu": (1024, 64), "cuda": (16384, 512)}

# A prompt of a decoder takes at most this share of the memory that is free once the model is loaded.
_PROMPT_SHARE = 0.25

# Settings of models that generate, with the value that they have where nobody sets them. One deployment may serve both
# kinds of models with the same settings: other values have no effect here. On a GPU, QUIRE_QUANTIZATION of an encoder
# has none.
_NEUTRAL = {"attention_backend": "triton", "drafter": "none", "kv_cache_dtype": "auto"}


@dataclass(frozen=True, slots=True)
class EncoderInstance:
    """A loaded, warm encoder. The runner is for one thread."""

    description: WorkerDescription
    runner: EncoderRunner
    memory: MemoryAccount

    def close(self) -> None:
        """As `StepInstance` says."""
        self.runner.close()
        release_device(self.description.device)


def load_encoder(
    settings: WorkerSettings, description: AnyDescription, report: Callable[[str], None]
) -> EncoderInstance:
    """Loads the encoder of the settings, or the decoder that serves as one. Raises ModelNotFound, StartupFailed and its
    subclasses.
    """
    device = choose_device(settings.device)
    quantization = quantization_of_values(settings, description, device)
    for name in _without_effect(settings, quantization, device):
        report(f"QUIRE_{name.upper()} has no effect on an encoder")
    served = settings.served_model()
    dtype = choose_dtype(settings.dtype, device)
    torch.set_num_threads(settings.num_threads or available_cpus())
    defaults, layers = EmbeddingDefaults(), list[DenseLayer]()
    check_context_length(description.context_length)
    check_quantized(settings, description, dtype, device)
    kernels, _ = choose_kernels(settings, description, dtype, device)
    sizes = read_value_sizes(served.path, description, dtype)
    check_fits(settings.model_copy(update={"quantization": quantization}), sizes, kernels, None, device, dtype)
    memory = MemoryAccount(device)
    with progress(f"loading {served.name}", report):
        head = load_score_head(description, served.path, device)
        if head is None:
            defaults = embedding_defaults(served.path, is_decoder=is_decoder(description))
            layers = load_layers(defaults.layers, description.hidden_size, served.path, device)
        backend = load_backend(settings, description, served.path, dtype, device, report)
    memory.note_weights()
    if served.other_tokenizer is not None:
        check_vocabulary(served.other_tokenizer, description.vocab_size, tokenizer_setting(settings.tokenizer))
    limits = _limits(settings, description, backend, defaults.max_tokens, device, report)
    pooler = EmbeddingPooler(defaults, layers) if head is None else ScorePooler(head)
    runner = EncoderRunner(
        backend.forward,
        pooler,
        limits,
        deterministic=settings.deterministic,
        is_batch_invariant=backend.is_batch_invariant,
    )
    # What vectors depend on beside weights and dtype; in deterministic mode to the last bit.
    made = repr(description.score_head or defaults)
    arithmetic = f"{made} {backend.arithmetic}" if settings.deterministic else made
    with progress("warming up", report):
        rate = _measure(runner, pooler.result, _BUDGETS[device.type][0])
    return EncoderInstance(
        WorkerDescription(
            model=served.name,
            fingerprint=model_fingerprint(
                served.path,
                dtype,
                quantization,
                arithmetic=arithmetic,
                other_weights=[weights_of(layer, served.path) for layer in defaults.layers],
            ),
            tokenizer_fingerprint=tokenizer_fingerprint(served.tokenizer_path),
            block_bytes=0,
            limits=limits,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            prefill_tokens_per_second=rate,
            results={pooler.result: PromptComputation.INDIVISIBLE_WITHOUT_KV},
        ),
        runner,
        memory,
    )


def _without_effect(settings: WorkerSettings, quantization: str, device: torch.device) -> Iterator[str]:
    """The settings that are set, and have no effect here. `quantization` is the one that has an effect."""
    yield from (name for name, neutral in _NEUTRAL.items() if getattr(settings, name) != neutral)
    if settings.kernels not in KERNELS[device.type]:
        yield "kernels"
    if settings.quantization != quantization:
        yield "quantization"


def _limits(
    settings: WorkerSettings,
    description: AnyDescription,
    backend: EncoderBackend,
    max_tokens: int | None,
    device: torch.device,
    report: Callable[[str], None],
) -> WorkerLimits:
    """The limits, with `max_tokens` those that the model's files allow in a prompt."""
    lengths = (description.context_length, max_tokens, settings.max_model_len)
    context_length = min(length for length in lengths if length is not None)
    step_tokens, sequences = _BUDGETS[device.type]
    if backend.prompt_bytes is not None and settings.max_model_len is None:
        free = _free_memory(settings, device)
        context_length = fitting_context(backend.prompt_bytes, context_length, step_tokens, free, report)
    return WorkerLimits(
        vocab_size=description.vocab_size,
        context_length=context_length,
        block_size=settings.block_size,
        num_blocks=0,
        max_step_tokens=settings.max_step_tokens or step_tokens,
        max_sequences=settings.max_sequences or sequences,
        # A prompt is computed in one step, however long it is.
        max_indivisible_tokens=context_length,
    )


def fitting_context(
    prompt_bytes: Callable[[int], int],
    context_length: int,
    least: int,
    free: int,
    report: Callable[[str], None],
) -> int:
    """The context, halved until a prompt takes its share of so many free bytes, or `least` tokens are left.

    A prompt is computed in one step, so its memory grows with its length.
    """
    length = context_length
    while length // 2 >= least and prompt_bytes(length) > _PROMPT_SHARE * free:
        length //= 2
    if length < context_length:
        report(
            f"prompts have at most {length:,} tokens, not {context_length:,}: one takes at most {_PROMPT_SHARE:.0%} of "
            "the free memory; QUIRE_MAX_MODEL_LEN allows more"
        )
    return length


def _free_memory(settings: WorkerSettings, device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory(settings.memory_limit_bytes)


def _measure(runner: EncoderRunner, result: str, step_tokens: int) -> float:
    """Tokens per second of a step of so many tokens. The ones before it, which are not counted, take memory and compile
    kernels: some have other tiles for few tokens. Raises StartupFailed where a value is not finite.
    """
    limits = runner.limits
    length = min(limits.context_length, 128)
    count = max(1, min(limits.max_sequences, step_tokens // length))
    new = [NewSequence(number, [0] * length, length, 0, SamplingParams(), result=result) for number in range(count)]
    step = Step([], new, [ScheduledSequence(number, 0, length, []) for number in range(count)])
    short = NewSequence(count, [0], 1, 0, SamplingParams(), result=result)
    without_failures(runner.step(Step([], [short], [ScheduledSequence(count, 0, 1, [])])))
    seconds = [without_failures(runner.step(step)).busy_seconds for _ in range(2)]
    runner.reset()
    return count * length / seconds[-1]
