"""The Triton kernels compute every native architecture as transformers does, and every feature as torch's operators."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma4TextConfig, LlamaConfig, OlmoeConfig

import dense_models
import llama_models
import transformers_models
from core_runner import serve_preempted
from llama_models import VOCAB
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from runner_steps import Generate
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.description import (
    Activation,
    DecoderLayer,
    ModelDescription,
    Norm,
    NormKind,
)
from worker_svc.model.triton_model import load_triton_model
from worker_svc.step import SamplingParams

Save = Callable[..., Path]
Change = Callable[[ModelDescription], ModelDescription]

_rng = random.Random(5)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (2, 18)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_TOKENS = 3
EVERY_TOKEN = SamplingParams(logprobs=VOCAB)
_ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_TINY: dict[str, Any] = {**transformers_models.COMMON, **_ONE_LAYER, "num_key_value_heads": 1}
_TINY_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 7, "num_kv_shared_layers": 1,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
PREEMPTED: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: Gemma2Config(**_TINY, head_dim=16, sliding_window=7, layer_types=["sliding_attention"]),
    "olmoe": lambda: OlmoeConfig(**_TINY, num_experts=3, num_experts_per_tok=2),
    "gemma4": lambda: Gemma4TextConfig(**_TINY | _TINY_GEMMA4),
}
"""Small, for the interpreter."""
OTHERS = ("gpt2", "opt", "gpt-neox", "phi3", "phi3-longrope", "gemma2", "gemma3")


@pytest.mark.parametrize("variant", llama_models.VARIANTS)
def test_log_probabilities_are_those_of_the_modules(variant: str, save_model: Save) -> None:
    directory = save_model(llama_models.VARIANTS[variant]())
    modules, triton = Driver(make_runner(directory)), Driver(make_runner(directory, "triton", device=DEVICE), chunk=9)
    assert triton.generate(PROMPTS, NUM_TOKENS, EVERY_TOKEN) == modules.generate(PROMPTS, NUM_TOKENS, EVERY_TOKEN)
    _assert_equal(modules, triton)


@pytest.mark.parametrize("variant", OTHERS)
def test_log_probabilities_are_those_of_transformers(variant: str, save_model: Save) -> None:
    directory = save_model(transformers_models.VARIANTS[variant]())
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # Beyond the windows of these models
    prompts = [PROMPTS[0], PROMPTS[1] + PROMPTS[1][:7]]
    triton = Driver(make_runner(directory, "triton", device=DEVICE), chunk=9)
    sampled = triton.generate(prompts, NUM_TOKENS, EVERY_TOKEN)
    for sequence_id, (prompt, tokens) in enumerate(zip(prompts, sampled, strict=True), start=1):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for reported, expected in zip(triton.logprobs[sequence_id], logits.log_softmax(-1), strict=True):
            ours = torch.tensor([value for _, value in sorted(reported.top)])
            assert torch.allclose(ours, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("variant", "preemption"), [("gemma2", "swap"), ("gemma2", "recompute"), ("olmoe", "swap"), ("gemma4", "swap")]
)
def test_tokens_stay_the_same_with_cached_prefixes_and_preempted(
    variant: str, preemption: str, save_model: Save, reference: Generate
) -> None:
    """A dense model with a window that is shorter than its sequences, one with experts, and one whose layers differ in
    their heads and share keys and values.
    """
    directory = save_model(PREEMPTED[variant]())
    shared, first, second, *others = llama_models.prompts(9, 1, 6, 7, 7)
    asked = [*others, [*shared, *first], [*shared, *second]]
    runner = make_runner(
        directory, "triton", device=DEVICE, block_size=8, num_blocks=3, num_host_blocks=16, max_sequences=4
    )
    served = serve_preempted(make_instance(runner), 3, preemption, asked, 3)
    assert [one.token_ids for one in served] == reference(directory, asked, 3)
    assert (sum(one.num_returns for one in served) > 0) == (preemption == "swap")


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_steps_without_a_sample_store_what_later_ones_read(cuda_graphs: bool, save_model: Save) -> None:
    """They end after the last layer with keys and values of its own."""
    directory = save_model(dense_models.VARIANTS["gemma4-small"]())
    asked = llama_models.prompts(26)
    by_torch = Driver(make_runner(directory))
    limits: dict[str, Any] = {"max_sequences": 2, "max_step_tokens": 9}
    triton = Driver(make_runner(directory, "triton", device=DEVICE, cuda_graphs=cuda_graphs, **limits), chunk=9)
    assert triton.generate(asked, NUM_TOKENS, EVERY_TOKEN) == by_torch.generate(asked, NUM_TOKENS, EVERY_TOKEN)
    _assert_equal(by_torch, triton)


def _with_layers(change: Callable[[int, DecoderLayer], DecoderLayer]) -> Change:
    return lambda described: replace(
        described, layers=tuple(change(number, layer) for number, layer in enumerate(described.layers))
    )


def _attention(number: int, **changes: Any) -> Change:
    """The attention of one layer."""

    def change(at: int, layer: DecoderLayer) -> DecoderLayer:
        return replace(layer, attention=replace(layer.attention, **changes)) if at == number else layer

    return _with_layers(change)


def _rope(number: int, **changes: Any) -> Change:
    def change(described: ModelDescription) -> ModelDescription:
        rope = described.layers[number].attention.rope
        assert rope is not None
        return _attention(number, rope=replace(rope, **changes))(described)

    return change


def _norms(described: ModelDescription) -> ModelDescription:
    """Each with an epsilon of its own that matters; offsets, and layer norms."""
    epsilons = iter(0.1 * step for step in range(1, 20))

    def changed(norm: Norm, **changes: Any) -> Norm:
        return replace(norm, eps=next(epsilons), weight_offset=0.7, **changes)

    def change(number: int, layer: DecoderLayer) -> DecoderLayer:
        attention = layer.attention
        assert attention.query_norm is not None
        assert attention.key_norm is not None
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        attention = replace(attention, query_norm=changed(attention.query_norm), key_norm=changed(attention.key_norm))
        kind = NormKind.LAYER if number else NormKind.RMS
        return replace(
            layer,
            attention=attention,
            attention_norm=changed(layer.attention_norm, kind=kind),
            mlp_norm=changed(layer.mlp_norm),
        )

    described = _with_layers(change)(described)
    return replace(described, norm=changed(described.norm))


def _norms_after(number: int, layer: DecoderLayer) -> DecoderLayer:
    """Attention and MLP see the hidden states as they are."""
    after: dict[str, Any] = {"post_attention_norm": layer.attention_norm, "post_mlp_norm": layer.mlp_norm}
    return replace(layer, attention_norm=None, mlp_norm=None, **after)


def _norms_after_rotation(number: int, layer: DecoderLayer) -> DecoderLayer:
    return replace(layer, attention=replace(layer.attention, norms_after_rotation=True))


CHANGES: dict[str, Change] = {
    "norms": _norms,
    "norms after rotation": _with_layers(_norms_after_rotation),
    "no positions": _attention(0, rope=None),
    "rotary positions of each layer": _rope(1, theta=3.0),
    "rotary positions of a part": _rope(0, rotated_dims=20),
    "norms of values": _attention(1, value_norm_eps=0.3),
    "parallel": _with_layers(lambda number, layer: replace(layer, parallel=True)),
    "norms after attention and MLP": _with_layers(_norms_after),
    "norms after parallel attention and MLP": _with_layers(
        lambda number, layer: replace(_norms_after(number, layer), parallel=True)
    ),
    "parallel and not": _with_layers(lambda number, layer: replace(layer, parallel=number == 0)),
    "relu": _with_layers(lambda number, layer: replace(layer, mlp=replace(layer.mlps[0], activation=Activation.RELU))),
    "gelu": _with_layers(lambda number, layer: replace(layer, mlp=replace(layer.mlps[0], activation=Activation.GELU))),
    "embedding and logits": lambda described: replace(
        described, embedding_scale=3.3, logits_scale=0.3, logits_soft_cap=2.0
    ),
}


def _compare(directory: Path, change: Change) -> None:
    """The Triton kernels and torch's operators agree, and what was changed matters."""
    described = describe(read_config(directory))
    assert described is not None
    changed = change(described)
    by_torch = Driver(make_runner(directory, description=changed))
    triton = Driver(make_runner(directory, "triton", device=DEVICE, description=changed), chunk=9)
    assert triton.generate(PROMPTS, 2, EVERY_TOKEN) == by_torch.generate(PROMPTS, 2, EVERY_TOKEN)
    _assert_equal(by_torch, triton)
    unchanged = Driver(make_runner(directory, description=described))
    unchanged.generate(PROMPTS, 1, EVERY_TOKEN)
    first, other = (dict(driver.logprobs[2][0].top) for driver in (by_torch, unchanged))
    assert first != pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("name", CHANGES)
def test_features_are_computed_as_by_torchs_operators(name: str, save_model: Save) -> None:
    _compare(save_model(llama_models.VARIANTS["qwen3"]()), CHANGES[name])


def test_norms_of_updates_beside_each_other(save_model: Save) -> None:
    directory = save_model(transformers_models.VARIANTS["gemma2"]())
    _compare(directory, _with_layers(lambda number, layer: replace(layer, parallel=True)))


def test_heads_of_more_than_512_dimensions_are_refused(save_model: Save) -> None:
    directory = save_model(LlamaConfig(**llama_models.SIZES | {"head_dim": 528}))
    described = describe(read_config(directory))
    assert described is not None
    with pytest.raises(
        UnsupportedModel, match="Triton kernels do not compute attention of heads of 528 dimensions: the most is 512"
    ):
        load_triton_model(described, directory, torch.float32, torch.device(DEVICE))


def _assert_equal(expected: Driver, actual: Driver) -> None:
    """The log-probabilities of all tokens."""
    for sequence_id, every in expected.logprobs.items():
        for reported, wanted in zip(actual.logprobs[sequence_id], every, strict=True):
            assert dict(reported.top) == pytest.approx(dict(wanted.top), abs=2e-4)
