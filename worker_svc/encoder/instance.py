"""Loads an encoder and warms it up: from settings to a runner that is ready for steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from svc_common.models import tokenizer_fingerprint, tokenizer_setting
from worker_svc.description import WorkerDescription, WorkerLimits
from worker_svc.encoder.pooling import EmbeddingDefaults
from worker_svc.encoder.runner import EncoderRunner
from worker_svc.fingerprint import model_fingerprint
from worker_svc.host import available_cpus
from worker_svc.instance import check_vocabulary, choose_device, choose_dtype
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.torch_encoder import load_torch_encoder
from worker_svc.progress import progress
from worker_svc.settings import WorkerSettings
from worker_svc.step import ENCODER_RESULTS, NewSequence, SamplingParams, ScheduledSequence, Step

# Tokens and sequences of a step. Others wait for the whole step, so it is short on a CPU.
_BUDGETS = {"cpu": (1024, 64), "cuda": (16384, 512)}

# Settings of decoders, with the values that ask for nothing of an encoder. A deployment may have both, with the same
# settings: the others have no effect here.
_NEUTRAL = {
    "drafter": ("none",),
    "kernels": ("auto", "torch"),
    "kv_cache_dtype": ("auto",),
    "quantization": ("none",),
}


@dataclass(frozen=True, slots=True)
class EncoderInstance:
    """A loaded, warm encoder. The runner is for one thread."""

    description: WorkerDescription
    runner: EncoderRunner


def load_encoder(
    settings: WorkerSettings, description: EncoderDescription, report: Callable[[str], None]
) -> EncoderInstance:
    """Loads the encoder of the settings. Raises ModelNotFound, StartupFailed and its subclasses."""
    for name, neutral in _NEUTRAL.items():
        if getattr(settings, name) not in neutral:
            report(f"QUIRE_{name.upper()} has no effect on an encoder")
    served = settings.served_model()
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    torch.set_num_threads(settings.num_threads or available_cpus())
    defaults = embedding_defaults(served.path)
    with progress(f"loading {served.name}", report):
        encoder = load_torch_encoder(description, served.path, dtype, device)
    if served.other_tokenizer is not None:
        check_vocabulary(served.other_tokenizer, description.vocab_size, tokenizer_setting(settings.tokenizer))
    lengths = (description.context_length, defaults.max_tokens, settings.max_model_len)
    context_length = min(length for length in lengths if length is not None)
    step_tokens, sequences = _BUDGETS[device.type]
    limits = WorkerLimits(
        vocab_size=description.vocab_size,
        context_length=context_length,
        block_size=settings.block_size,
        num_blocks=0,
        # A prompt is computed in one step.
        max_step_tokens=max(settings.max_step_tokens or step_tokens, context_length),
        max_sequences=settings.max_sequences or sequences,
    )
    runner = EncoderRunner(encoder, defaults, limits, deterministic=settings.deterministic)
    with progress("warming up", report):
        rate = _measure(runner)
    return EncoderInstance(
        WorkerDescription(
            model=served.name,
            fingerprint=model_fingerprint(served.path, dtype, arithmetic=_arithmetic(settings, defaults)),
            tokenizer_fingerprint=tokenizer_fingerprint(served.tokenizer_path),
            block_bytes=0,
            limits=limits,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            prefill_tokens_per_second=rate,
            results=ENCODER_RESULTS,
        ),
        runner,
    )


def _arithmetic(settings: WorkerSettings, defaults: EmbeddingDefaults) -> str:
    """What vectors depend on besides weights and dtype; in deterministic mode to the last bit."""
    if not settings.deterministic:
        return repr(defaults)
    return (
        f"{defaults!r} {torch.__version__} {torch.get_num_threads()} threads {torch.backends.cpu.get_cpu_capability()}"
    )


def _measure(runner: EncoderRunner) -> float:
    """Tokens per second of a full step. The first one, which is not counted, takes memory."""
    limits = runner.limits
    length = min(limits.context_length, 128)
    count = max(1, min(limits.max_sequences, limits.max_step_tokens // length))
    new = [
        NewSequence(number, [0] * length, length, 0, SamplingParams(), result="embedding") for number in range(count)
    ]
    step = Step([], new, [ScheduledSequence(number, 0, length, []) for number in range(count)])
    seconds = [runner.step(step).busy_seconds for _ in range(2)]
    runner.reset()
    return count * length / seconds[-1]
