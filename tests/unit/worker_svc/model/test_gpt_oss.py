"""gpt-oss: log-probabilities are those of transformers, and each of its features changes them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llama_models import prompts
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from transformers_models import VARIANTS, VOCAB, WINDOW
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.description import (
    Activation,
    DecoderLayer,
    ExpertsSpec,
    LinearLayer,
    MlpSpec,
    ModelDescription,
    RopeKind,
)
from worker_svc.model.device_formats import Quantization
from worker_svc.step import SamplingParams

Save = Callable[..., Path]
Change = Callable[[DecoderLayer], DecoderLayer]
EVERY_LOGPROB = SamplingParams(logprobs=VOCAB)


@pytest.fixture(scope="module")
def directory(save_model: Save) -> Path:
    return save_model(VARIANTS["gpt-oss"]())


@pytest.fixture(scope="module")
def description(directory: Path) -> ModelDescription:
    described = describe(read_config(directory))
    assert described is not None
    return described


def _reported(driver: Driver) -> torch.Tensor:
    """Log-probabilities of a driver's first sequence, [num_sampled, vocab_size]."""
    return torch.tensor([[value for _, value in sorted(step.top)] for step in driver.logprobs[1]])


def _of_prompt(directory: Path, kernels: str = "torch", **options: Any) -> torch.Tensor:
    (prompt,) = prompts(40)
    driver = Driver(make_runner(directory, kernels, **options))
    driver.generate([prompt], 1, EVERY_LOGPROB)
    return _reported(driver)


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("native", [True, False], ids=["described", "transformers' own modules"])
def test_log_probabilities_are_those_of_transformers_to_the_end_of_the_context(
    kernels: str, directory: Path, *, native: bool
) -> None:
    (prompt,) = prompts(70)
    runner = make_runner(directory, kernels, native=native)
    driver = Driver(runner, chunk=33)
    (sampled,) = driver.generate([prompt], runner.limits.context_length - len(prompt), EVERY_LOGPROB)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(_reported(driver), logits.log_softmax(-1), rtol=0, atol=5e-4)


def test_windows_alternate_and_all_layers_have_sinks(description: ModelDescription) -> None:
    layers = description.layout.layers
    assert [(layer.window, layer.has_sinks) for layer in layers] == [(WINDOW, True), (None, True)]


def _attention(**changes: Any) -> Change:
    return lambda layer: replace(layer, attention=replace(layer.attention, **changes))


def _rope(**changes: Any) -> Change:
    def change(layer: DecoderLayer) -> DecoderLayer:
        assert layer.attention.rope is not None
        return _attention(rope=replace(layer.attention.rope, **changes))(layer)

    return change


def _unbiased(layer: LinearLayer) -> LinearLayer:
    return replace(layer, stored=tuple(replace(stored, bias=False) for stored in layer.stored))


def _experts(change: Callable[[ExpertsSpec], ExpertsSpec]) -> Change:
    def of_layer(layer: DecoderLayer) -> DecoderLayer:
        assert isinstance(layer.mlp, ExpertsSpec)
        return replace(layer, mlp=change(layer.mlp))

    return of_layer


def _of_each_expert(name: str) -> Change:
    def without(mlp: MlpSpec) -> MlpSpec:
        changes: dict[str, Any] = {name: _unbiased(getattr(mlp, name))}
        return replace(mlp, **changes)

    return _experts(lambda spec: replace(spec, experts=tuple(map(without, spec.experts))))


def _activation(spec: ExpertsSpec) -> ExpertsSpec:
    return replace(spec, experts=tuple(replace(mlp, activation=Activation.SILU) for mlp in spec.experts))


WITHOUT: dict[str, tuple[Change, str | None]] = {
    "sinks": (_attention(sinks=None), ".sinks"),
    "windows": (_attention(window=None), None),
    "scaled positions": (_rope(kind=RopeKind.DEFAULT), None),
    "the factor of what is rotated": (_rope(attention_factor=1.0), None),
    "dimensions of blending that are not rounded": (_rope(truncate=True), None),
    "the bias of routers": (_experts(lambda spec: replace(spec, router=_unbiased(spec.router))), ".router.bias"),
    "biases of gate and up": (_of_each_expert("gate_up"), ".gate_up_proj_bias"),
    "biases of down": (_of_each_expert("down"), ".down_proj_bias"),
    "the activation": (_experts(_activation), None),
    "weights of the chosen experts alone": (_experts(lambda spec: replace(spec, normalized=False)), None),
}
"""Layers without one of their features, and the end of the names of tensors that are not read then."""


@pytest.mark.parametrize("name", WITHOUT)
def test_each_feature_changes_the_result(name: str, directory: Path, description: ModelDescription) -> None:
    change, unread = WITHOUT[name]
    without = replace(
        description,
        layers=tuple(map(change, description.layers)),
        unused_suffixes=() if unread is None else (unread,),
    )
    difference = _of_prompt(directory) - _of_prompt(directory, description=without)
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("kernels", "in_8_bits"),
    [
        ("compiled", {"weights": MatrixFormat.INT8}),
        ("compiled", {"weights": MatrixFormat.W8A8}),
        ("triton", {"quantization": Quantization.INT8}),
        ("triton", {"quantization": Quantization.W8A8}),
    ],
    ids=str,
)
def test_log_probabilities_in_8_bits_are_close(kernels: str, in_8_bits: dict[str, Any], directory: Path) -> None:
    plain, coded = _of_prompt(directory), _of_prompt(directory, kernels, **in_8_bits)
    assert 0 < (coded - plain).norm() < 0.2 * (plain - plain.mean()).norm()


def test_log_probabilities_in_4_bits_are_the_same_by_the_compiled_code_and_by_triton(directory: Path) -> None:
    """Which are far from those of the weights: these are random."""
    by_compiled = _of_prompt(directory, "compiled", weights=MatrixFormat.W4A16)
    by_triton = _of_prompt(directory, "triton", quantization=Quantization.W4A16)
    assert (by_triton - by_compiled).norm() < 0.05 * (by_compiled - by_compiled.mean()).norm()


@pytest.mark.parametrize("change", [{"swiglu_alpha": 1.0}, {"swiglu_limit": 10.0}], ids=str)
def test_another_activation_is_left_to_transformers(change: dict[str, float]) -> None:
    config = VARIANTS["gpt-oss"]()
    config.update(change)
    assert describe(config) is None
