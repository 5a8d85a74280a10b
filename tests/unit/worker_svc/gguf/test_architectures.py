"""GGUF files of each architecture that is read, against transformers' models that they are made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llama_models import generate, prompts, save_model
from model_gguf import CASES, GgufCase, write_model_gguf
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from tiny_gguf import TOKENS
from transformers_models import save_with_choice_biases
from worker_svc.gguf.architecture import architecture_names
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.step import SamplingParams

# Prompts longer than windows, of which some tokens are beyond the original context of stretched positions
PROMPTS = prompts(1, 9, 37)
EVERY_LOGPROB = SamplingParams(logprobs=len(TOKENS))
# Those of which tests of their own read files.
ELSEWHERE = {"gemma2", "gemma3", "gemma4", "llama", "phi3", "qwen2", "qwen3", "qwen3moe"}

Convert = Callable[..., tuple[Path, Path]]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """Directories of transformers' model, and of what is made of its GGUF file."""

    def make(case: GgufCase, *args: Any, keeps_blocks: bool = True) -> tuple[Path, Path]:
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        ours.mkdir()
        theirs.mkdir()
        save_with_choice_biases(lambda config: save_model(theirs, config), case.config())
        model = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
        path = write_model_gguf(tmp_path / "tiny.gguf", case, model, *args)
        GgufConversion(path, ours, print).run(keeps_blocks=keeps_blocks)
        return theirs, ours

    return make


def test_every_architecture_has_a_case() -> None:
    names = {"".join(letter if letter.isalnum() else "_" for letter in case.architecture) for case in CASES.values()}
    assert names | ELSEWHERE == set(architecture_names())


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, converted: Convert) -> None:
    theirs, ours = converted(CASES[name])
    expected = generate(theirs, PROMPTS, 8)
    for kernels in ("torch", "compiled"):
        assert Driver(make_runner(ours, kernels, num_blocks=64)).generate(PROMPTS, 8) == expected


@pytest.mark.parametrize("name", CASES)
def test_blocks_keep_their_codes(name: str, converted: Convert) -> None:
    """Layers are multiplied with the codes that torch's operators see as numbers."""
    case = CASES[name]
    kind = "MXFP4" if case.architecture == "gpt-oss" else "Q8_0"
    _, ours = converted(case, case.stored(kind))
    types = json.loads((ours / "config.json").read_text())["quantization_config"]["types"]
    assert set(types.values()) == {kind}
    assert any("embed" in layer or layer.endswith("wte") for layer in types)
    assert not case.is_mixture or any(".experts." in layer for layer in types)
    found = []
    for kernels, weights in (("torch", MatrixFormat.PLAIN), ("compiled", MatrixFormat.INT8)):
        driver = Driver(make_runner(ours, kernels, weights=weights, num_blocks=64))
        driver.generate(PROMPTS[-1:], 4, EVERY_LOGPROB)
        found.append(torch.tensor([[value for _, value in sorted(step.top)] for step in driver.logprobs[1]]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)
