"""The compiled forward pass computes the same bits of logits, keys and values in any step and with any number of
threads.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig

import compiled
import dense_models
import transformers_models
import worker_svc.model.compiled_builder
from large import large_but
from llama_models import SIZES, VARIANTS, VOCAB
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.linear import MatrixFormat
from tiny_gguf import TinyGguf, as_q4_k_m, write_tiny_gguf
from worker_svc.attention import CompiledKernels
from worker_svc.batch import SequenceChunk, make_batch
from worker_svc.cache import CacheShape
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config

BLOCK = 16
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": VARIANTS["llama"],
    "window": VARIANTS["qwen3-window"],
    "yarn": VARIANTS["llama-rope-yarn"],
    "odd": lambda: LlamaConfig(**SIZES | {"hidden_size": 54, "intermediate_size": 83}),
    "gemma2": lambda: _longer("gemma2"),
    "neox": lambda: _longer("gpt-neox"),
    "opt": lambda: _longer("opt"),
    "experts": lambda: _longer("qwen2-moe"),
    "joint norms": lambda: _longer("olmoe"),
    "sinks": lambda: _longer("gpt-oss"),
    "gemma4 small": lambda: _longer("gemma4-small"),
    "gemma4 experts": lambda: _longer("gemma4-experts"),
}
# The dtype, the format of weights, and whether products are computed by AMX
ARITHMETICS = {
    "float32": (torch.float32, MatrixFormat.PLAIN, False),
    "bfloat16": (torch.bfloat16, MatrixFormat.PLAIN, False),
    "int8": (torch.bfloat16, MatrixFormat.INT8, False),
    "w8a8": (torch.bfloat16, MatrixFormat.W8A8, False),
    "float32+w8a8": (torch.float32, MatrixFormat.W8A8, False),
    "w4a16": (torch.bfloat16, MatrixFormat.W4A16, False),
    "w4a8": (torch.bfloat16, MatrixFormat.W4A8, False),
    "float32+w4a16": (torch.float32, MatrixFormat.W4A16, False),
    "float32+w4a8": (torch.float32, MatrixFormat.W4A8, False),
    "grouped w8a16": (torch.bfloat16, MatrixFormat.GROUPED_W8A16, False),
    "grouped w8a8": (torch.bfloat16, MatrixFormat.GROUPED_W8A8, False),
    "amx": (torch.bfloat16, MatrixFormat.PLAIN, True),
    "amx+int8": (torch.bfloat16, MatrixFormat.INT8, True),
    "amx+w8a8": (torch.bfloat16, MatrixFormat.W8A8, True),
    "amx+w4a16": (torch.bfloat16, MatrixFormat.W4A16, True),
    "amx+w4a8": (torch.bfloat16, MatrixFormat.W4A8, True),
    "amx+grouped w8a16": (torch.bfloat16, MatrixFormat.GROUPED_W8A16, True),
    "amx+grouped w8a8": (torch.bfloat16, MatrixFormat.GROUPED_W8A8, True),
}
# Every arithmetic with a dense model and with experts; each other model in both dtypes and with some of the coded ones.
_ALL = ("llama", "experts")
_CODED = [kind for kind in ARITHMETICS if kind not in ("float32", "bfloat16", "amx")]
PAIRS = [
    f"{config}-{kind}"
    for place, config in enumerate(CONFIGS)
    for kind in ARITHMETICS
    if config in _ALL or kind not in _CODED or (_CODED.index(kind) + place) % 4 == 0
]
_RNG = np.random.default_rng(11)
SEQUENCES = [_RNG.integers(VOCAB, size=length, dtype=np.int32) for length in (1, 15, 16, 17, 40, 63, 64, 65, 130)]


def _longer(variant: str) -> Any:
    """A config whose context has room for SEQUENCES."""
    config = (transformers_models.VARIANTS | dense_models.VARIANTS)[variant]()
    config.max_position_embeddings = max(map(len, SEQUENCES))
    return config


class Computation:
    """A model with a zero cache, in which each sequence has its own blocks."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, weights: MatrixFormat, cache_dtype: torch.dtype, num_threads: int
    ) -> None:
        description = describe(read_config(directory))
        assert description is not None
        self._model = load_compiled_model(
            description, directory, dtype, CompiledKernels(compiled.thread_pool(num_threads), weights)
        )
        blocks_each = -(-max(map(len, SEQUENCES)) // BLOCK)
        self.cache = CacheShape.of(description.layout, BLOCK, cache_dtype).allocate(
            blocks_each * len(SEQUENCES), torch.device("cpu")
        )
        self.cache.blocks.zero_()
        self._blocks = np.arange(blocks_each * len(SEQUENCES), dtype=np.int32).reshape(len(SEQUENCES), -1)
        self.forward = self._model.over(self.cache)

    def run(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """A step of tokens first to end - 1 of sequences: for each part the logits behind each of its tokens."""
        lengths = [end - first for _, first, end in parts]
        return list(torch.split(self.sample(parts, np.arange(sum(lengths))), lengths))

    @torch.inference_mode()
    def sample(self, parts: list[tuple[int, int, int]], rows: NDArray[np.int64]) -> Tensor:
        """As `run`: the logits behind these tokens of the step."""
        chunks = [SequenceChunk(SEQUENCES[s][first:end], first, self._blocks[s], 0, True) for s, first, end in parts]
        scores = self.forward(replace(make_batch(chunks, BLOCK), logits_indices=rows))
        assert self.forward.argmax(scores).tolist() == scores.argmax(-1).tolist()
        return scores.clone()


Make = Callable[[int], Computation]


# A cache in 8 bits
CODED_CACHES = [
    f"{config}-{kind}, 8 bits"
    for config in ("llama", "window", "gemma2", "gemma4 small")
    for kind in ("float32", "bfloat16", "amx+w8a8")
]
# Files of GGUF, whose blocks keep their codes, and the arithmetics that these have
GGUF_TYPES: dict[str, Callable[[str], str]] = {
    "gguf Q4_K_M": as_q4_k_m,
    "gguf Q8_0": lambda _: "Q8_0",
    "gguf Q4_1": lambda _: "Q4_1",
}
GGUF_ARITHMETICS = ("w8a8", "w4a16", "w4a8", "amx+w8a8", "amx+w4a16", "amx+w4a8")


def _converted(folder: Path, stored: Callable[[str], str]) -> Path:
    model = TinyGguf(hidden=256, intermediate=256, stored=stored, context=max(map(len, SEQUENCES)))
    file = write_tiny_gguf(folder / "tiny.gguf", model)
    directory = folder / "blocks"
    directory.mkdir()
    GgufConversion(file, directory, print).run(keeps_blocks=True)
    return directory


@pytest.fixture(
    params=[
        *PAIRS,
        *CODED_CACHES,
        *(f"{file}-{kind}" for file in GGUF_TYPES for kind in GGUF_ARITHMETICS),
    ]
)
def make(
    request: pytest.FixtureRequest, save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Make:
    config, _, kind = request.param.partition("-")
    kind, _, coded_cache = kind.partition(", ")
    dtype, weights, use_amx = ARITHMETICS[kind]
    if use_amx and not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    monkeypatch.setattr(worker_svc.model.compiled_builder, "has_amx", lambda _: use_amx)
    directory = save_model(CONFIGS[config]()) if config in CONFIGS else _converted(tmp_path, GGUF_TYPES[config])
    cache_dtype = torch.int8 if coded_cache else dtype
    return lambda num_threads: Computation(directory, dtype, weights, cache_dtype, num_threads)


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def alone(computation: Computation) -> list[Tensor]:
    """The scores of each sequence, computed in a step of its own."""
    return [computation.run([(s, 0, len(tokens))])[0] for s, tokens in enumerate(SEQUENCES)]


def assert_same(computation: Computation, scores: list[Tensor], expected: Computation, by: list[Tensor]) -> None:
    for ours, theirs in zip(scores, by, strict=True):
        assert torch.equal(bits(ours), bits(theirs))
    assert torch.equal(computation.cache.blocks, expected.cache.blocks)


@pytest.mark.parametrize("num_threads", large_but([2, 3], 3))
def test_in_one_step_with_others(make: Make, num_threads: int) -> None:
    expected, together = make(1), make(num_threads)
    scores = together.run([(s, 0, len(tokens)) for s, tokens in enumerate(SEQUENCES)])
    assert_same(together, scores, expected, alone(expected))


@pytest.mark.parametrize("chunk", large_but([1, 7, 33], 1, 33))
def test_in_chunks_among_those_of_others(make: Make, chunk: int) -> None:
    """Chunks of 1 are decodes: a token that was decoded is computed to the same bits when it is a part of a prompt."""
    expected, cut = make(1), make(2)
    parts: list[list[Tensor]] = [[] for _ in SEQUENCES]
    for first in range(0, max(map(len, SEQUENCES)), chunk):
        step = [
            (s, first, min(first + chunk, len(tokens))) for s, tokens in enumerate(SEQUENCES) if first < len(tokens)
        ]
        for (s, _, _), scores in zip(step, cut.run(step), strict=True):
            parts[s].append(scores)
    assert_same(cut, [torch.cat(scores) for scores in parts], expected, alone(expected))


def test_behind_some_tokens_as_behind_all(make: Make) -> None:
    """The last layers compute the sampled tokens alone."""
    computation, whole = make(2), [(s, 0, len(tokens)) for s, tokens in enumerate(SEQUENCES)]
    scores = torch.cat(computation.run(whole))
    lasts = np.cumsum(list(map(len, SEQUENCES))) - 1
    runs = np.flatnonzero(np.arange(len(scores)) % 11 < 4)  # some go on from one sequence to the next
    for rows in (lasts, runs):
        assert torch.equal(bits(computation.sample(whole, rows)), bits(scores[rows]))


@torch.inference_mode()
def test_argmax_is_known_for_the_last_logits_only(make: Make) -> None:
    computation = make(2)
    earlier = computation.run([(2, 0, 16)])[0]
    with pytest.raises(ValueError, match="logits: must be those"):
        computation.forward.argmax(earlier)
