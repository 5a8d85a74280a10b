"""Every variant of the family computes what transformers computes, and reports what it does not support."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llama_models import VARIANTS, VOCAB
from runner_driver import Driver, make_runner
from worker_svc.attention import AttentionKind
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.loading import load
from worker_svc.model.torch_model import TorchModel
from worker_svc.step import SamplingParams

Save = Callable[..., Path]


def _load(directory: Path) -> None:
    model = load(directory, describe(read_config(directory)), torch.float32, torch.device("cpu"), AttentionKind.TORCH)
    assert isinstance(model, TorchModel)


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_those_of_transformers(variant: str, save_model: Save) -> None:
    directory = save_model(VARIANTS[variant]())
    _load(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(100)]

    driver = Driver(make_runner(directory), chunk=33)
    (sampled,) = driver.generate([prompt], 20, SamplingParams(logprobs=VOCAB))

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    for message, expected in zip(driver.logprobs[1], logits.log_softmax(-1), strict=True):
        ours = torch.tensor([value for _, value in sorted(message.top)])
        assert torch.allclose(ours, expected, atol=1e-4)


def test_bfloat16_is_closer_to_float32_than_rounding_every_sum_would_be(save_model: Save) -> None:
    directory = save_model(VARIANTS["llama"]())
    prompt = list(range(60))
    rounded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    exact: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
        expected, theirs = (model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for model in (exact, rounded))

    driver = Driver(make_runner(directory, dtype=torch.bfloat16))
    driver.generate([prompt], 1, SamplingParams(logprobs=VOCAB))
    ours = torch.tensor([value for _, value in sorted(driver.logprobs[1][0].top)])
    assert (ours - expected).norm() < (theirs.float() - expected).norm()


def test_sharded_checkpoints_load(tiny_llama: Path, save_model: Save) -> None:
    sharded = save_model(VARIANTS["llama"](), max_shard_size="40KB")
    assert not (sharded / "model.safetensors").exists()
    prompts = [[5, 6, 7]]
    assert Driver(make_runner(sharded)).generate(prompts, 5) == Driver(make_runner(tiny_llama)).generate(prompts, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight .* is \\[3\\]"),
        (lambda tensors: tensors.update({"model.layers.0.extra": torch.zeros(3)}), "model.layers.0.extra"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, save_model: Save
) -> None:
    directory = save_model(VARIANTS["llama"]())
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        _load(directory)
