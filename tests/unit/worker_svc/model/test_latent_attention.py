"""Models with latent attention compute what transformers computes, and the cache holds one vector for each token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

import compiled
import latent_models
from core_runner import CoreRunner, serve_preempted, submission
from drafters import knowing
from large import large_but
from llama_models import prompts
from ordered_dots import order_dots
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from runner_steps import Generate, new_sequence, run_step
from transformers_models import VOCAB
from worker_svc.attention import AttentionKind, CompiledKernels
from worker_svc.cache import CacheShape
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.decoder_states import load_decoder_states
from worker_svc.model.description import (
    AttentionSpec,
    ModelDescription,
)
from worker_svc.model.loading import load, unsupported_natively
from worker_svc.step import SamplingParams, ScheduledSequence

Save = Callable[..., Path]
Change = Callable[[ModelDescription], ModelDescription]

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "compiled"]
PROMPTS = prompts(1, 15, 16, 17, 40, 65)
NUM_TOKENS = 12
PREEMPTIONS = ["swap", "recompute"]
# Interpreted kernels take long. Without a GPU no graph is captured: with `cuda_graphs` the same steps have more rows.
PREEMPTIONS_OF_TRITON = PREEMPTIONS if torch.cuda.is_available() else PREEMPTIONS[:1]
CUDA_GRAPHS = [False, True] if torch.cuda.is_available() else [True]


@pytest.fixture(scope="module", params=latent_models.VARIANTS)
def directory(request: pytest.FixtureRequest, save_model: Save) -> Path:
    return latent_models.save(save_model, request.param)


@pytest.fixture(scope="module")
def description(directory: Path) -> ModelDescription:
    return latent_models.describe_saved(directory)


def test_tensors_are_those_that_transformers_saves(directory: Path, description: ModelDescription) -> None:
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    described = dict(description.shapes)
    for linear in description.linear_layers:
        for layer in linear.stored:
            described[f"{layer.name}.weight"] = sum(layer.outputs), linear.inputs
            described |= {f"{layer.name}.bias": (sum(layer.outputs),)} if layer.bias else {}
    assert described == stored


@pytest.mark.parametrize("kernels", BACKENDS)
def test_tokens_are_those_of_transformers(kernels: str, directory: Path, reference: Generate) -> None:
    expected = reference(directory, PROMPTS, NUM_TOKENS)
    runner = make_runner(directory, kernels)
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected, "in a crowd"
    assert Driver(runner, chunk=7, ahead=1).generate(PROMPTS, NUM_TOKENS) == expected, "in chunks"
    driver = Driver(runner)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert driver.generate([prompt], NUM_TOKENS) == [tokens], "alone"
        again = prompt + tokens[:5]
        assert driver.generate([again], NUM_TOKENS - 5) == [tokens[5:]], "computed again, as after a preemption"


@pytest.mark.parametrize("kernels", BACKENDS)
def test_logprobs_are_those_of_transformers(kernels: str, directory: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    driver, prompt = Driver(make_runner(directory, kernels)), PROMPTS[-1]
    driver.generate([prompt], 1, SamplingParams(logprobs=VOCAB))
    with torch.inference_mode():
        expected = log_softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)
    ((reported,),) = driver.logprobs.values()
    assert dict(reported.top) == pytest.approx(dict(enumerate(expected.tolist())), abs=2e-4)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_a_sequence_may_begin_behind_a_cached_prefix(kernels: str, directory: Path) -> None:
    prompt, runner = PROMPTS[-1], make_runner(directory, kernels)
    (whole,) = run_step(runner, [new_sequence(1, prompt)], ScheduledSequence(1, 0, len(prompt), [0, 1, 2, 3, 4]))
    (rest,) = run_step(runner, [new_sequence(2, prompt)], ScheduledSequence(2, 48, len(prompt) - 48, [0, 1, 2, 20, 21]))
    assert rest.token_ids == whole.token_ids


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_tokens_stay_the_same_with_cached_prefixes_and_preempted(
    preemption: str, kernels: str, directory: Path, reference: Generate
) -> None:
    shared, *longer = prompts(19, 1, 7, 8, 9, 15, 33, 50)
    asked = [*longer, *([*shared, *prompt] for prompt in longer[:4])]
    runner = make_runner(directory, kernels, block_size=8, num_blocks=16, num_host_blocks=64)
    served = serve_preempted(make_instance(runner), 16, preemption, asked, NUM_TOKENS)
    assert [one.token_ids for one in served] == reference(directory, asked, NUM_TOKENS)


def test_a_token_takes_one_vector_of_a_layer(directory: Path, description: ModelDescription) -> None:
    config = read_config(directory)
    shape = CacheShape.of(description.layout, 16, torch.float32)
    assert shape.block_bytes == config.num_hidden_layers * 16 * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    cache = shape.allocate(2, CPU)
    assert cache.blocks.shape[1] == shape.block_bytes
    last = cache.layers[config.num_hidden_layers - 1]
    last.keys[1] = 7.0
    assert bool((last.values[1] == 7.0).all())
    assert not cache.layers[0].keys.any()


def test_hidden_states_of_prompts_are_those_of_transformers(directory: Path, description: ModelDescription) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    states = load_decoder_states(description, directory, torch.float32, CPU)
    asked = prompts(5, 18)
    with torch.inference_mode():
        for prompt, ours in zip(asked, states(asked), strict=True):
            expected: Tensor = model.model(torch.tensor([prompt])).last_hidden_state[0]
            torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("directory", large_but(latent_models.VARIANTS, "deepseek-v2", "deepseek-v3"), indirect=True)
@pytest.mark.parametrize("cuda_graphs", CUDA_GRAPHS)
def test_the_triton_kernels_compute_the_tokens_of_transformers(
    cuda_graphs: bool, directory: Path, reference: Generate
) -> None:
    asked = [*prompts(2), *PROMPTS[2:4]]
    expected = reference(directory, asked, 4)
    runner = make_runner(directory, "triton", device=DEVICE, cuda_graphs=cuda_graphs, max_sequences=4)
    assert Driver(runner, chunk=9).generate(asked, 4) == expected, "in chunks, beside decodes"
    again = asked[2] + expected[2][:2]
    assert Driver(runner).generate([again], 2) == [expected[2][2:]], "alone, as after a preemption"


@pytest.mark.parametrize("directory", large_but(latent_models.VARIANTS, "deepseek-v2", "deepseek-v3"), indirect=True)
def test_the_triton_kernels_compute_the_logprobs_of_torch(directory: Path) -> None:
    tops = []
    for driver in (
        Driver(make_runner(directory)),
        Driver(make_runner(directory, "triton", device=DEVICE), chunk=9),
    ):
        driver.generate([PROMPTS[3]], 3, SamplingParams(logprobs=VOCAB))
        (reported,) = driver.logprobs.values()
        tops.append([dict(token.top) for token in reported])
    for by_torch, by_triton in zip(*tops, strict=True):
        assert by_triton == pytest.approx(by_torch, abs=2e-4)


@pytest.mark.parametrize("directory", large_but(latent_models.VARIANTS, "deepseek-v3"), indirect=True)
@pytest.mark.parametrize("cuda_graphs", CUDA_GRAPHS)
def test_bits_of_the_triton_kernels_do_not_depend_on_the_batch(
    cuda_graphs: bool, directory: Path, reference: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    runner = make_runner(
        directory, "triton", device=DEVICE, deterministic=True, cuda_graphs=cuda_graphs, max_sequences=4
    )
    params = SamplingParams(logprobs=3)
    together = Driver(runner, chunk=11)
    tokens = together.generate(PROMPTS[2:4], 2, params)
    assert tokens == reference(directory, PROMPTS[2:4], 2)
    alone = Driver(runner)
    alone.generate([PROMPTS[3]], 2, params)
    assert alone.logprobs[1] == together.logprobs[2]


@pytest.mark.parametrize(
    ("kernels", "name", "dtype", "preemption"),
    [
        *(("compiled", "deepseek-v2", torch.bfloat16, preemption) for preemption in PREEMPTIONS),
        *(("compiled", "deepseek-v3", torch.float32, preemption) for preemption in PREEMPTIONS),
        *(
            pytest.param("triton", "deepseek-v2", torch.float32, preemption, marks=pytest.mark.large)
            for preemption in PREEMPTIONS_OF_TRITON
        ),
    ],
    ids=str,
)
def test_bits_stay_the_same_with_drafts_prefixes_and_preemptions_together(
    kernels: str, name: str, dtype: torch.dtype, preemption: str, save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    directory = latent_models.save(save_model, name)
    device = DEVICE if kernels == "triton" else "cpu"
    options: dict[str, Any] = {"device": device, "dtype": dtype, "block_size": 8, "deterministic": kernels == "triton"}
    shared, *others = prompts(17, 1, 7, 8)
    asked, num_tokens = [*others, *([*shared, *prompt] for prompt in others[:2])], 8
    plain = Driver(make_runner(directory, kernels, **options))
    expected = plain.generate(asked, num_tokens, SamplingParams(logprobs=2))
    texts = [prompt + tokens for prompt, tokens in zip(asked, expected, strict=True)]
    drafts: dict[str, Any] = {"make_drafter": knowing(texts, VOCAB, 1), "max_draft_tokens": 3}
    runner = make_runner(directory, kernels, **options, num_blocks=5, num_host_blocks=32, **drafts)
    core_runner = CoreRunner(make_instance(runner), 5, preemption)
    served = core_runner.serve(
        submission(str(place), prompt, num_tokens, logprobs=2) for place, prompt in enumerate(asked)
    )
    for place, tokens in enumerate(expected):
        (one,) = served[str(place)]
        reported = [(each.logprob, tuple(each.top)) for each in plain.logprobs[1 + place]]
        assert (one.token_ids, one.logprobs) == (tokens, reported)
    assert core_runner.core.totals.cache_hits > 0
    assert core_runner.core.totals.preemptions > 0
    assert sum(core_runner.num_results[count] for count in (2, 3, 4)) > 0
    num_returns = sum(one.num_returns for group in served.values() for one in group)
    assert (num_returns > 0) == (preemption == "swap")


@pytest.mark.parametrize(
    ("kernels", "dtype", "block_size"),
    [
        ("triton", torch.float32, 16),
        *(("compiled", dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in (8, 16, 32)),
    ],
    ids=str,
)
def test_a_cache_in_8_bits_changes_little(kernels: str, dtype: torch.dtype, block_size: int, save_model: Save) -> None:
    directory = latent_models.save(save_model, "deepseek-v2-lite")
    tops = []
    # The interpreter does not round float8.
    for cache_dtype in (None, torch.int8):
        device = DEVICE if kernels == "triton" else "cpu"
        runner = make_runner(
            directory, kernels, device=device, dtype=dtype, block_size=block_size, cache_dtype=cache_dtype
        )
        driver = Driver(runner)
        driver.generate([PROMPTS[2]], 1, SamplingParams(logprobs=VOCAB))
        ((reported,),) = driver.logprobs.values()
        tops.append(dict(reported.top))
    assert tops[0] == pytest.approx(tops[1], abs=0.2)
    assert tops[0] != tops[1]


def test_latent_vectors_of_more_than_512_dimensions_are_refused_by_the_triton_kernels(save_model: Save) -> None:
    directory = save_model(latent_models.with_rank(520))
    with pytest.raises(UnsupportedModel, match="latent vectors of 520 dimensions: the most is 512"):
        make_runner(directory, "triton", device=DEVICE)


def test_every_backend_computes_it(description: ModelDescription) -> None:
    for kernels in (AttentionKind.TORCH, CompiledKernels(compiled.thread_pool()), AttentionKind.TRITON):
        assert unsupported_natively(description, kernels) is None


@pytest.mark.parametrize("kernels", BACKENDS)
def test_layers_of_different_latent_attention_are_refused_by_name(
    kernels: str, directory: Path, description: ModelDescription
) -> None:
    """transformers' modules do not compute them either, over a paged cache."""

    def narrower(spec: AttentionSpec) -> AttentionSpec:
        assert spec.latent is not None
        (kv_up,) = spec.latent.kv_up.stored
        width = spec.num_heads * (spec.latent.plain_dim + 16)
        latent = replace(
            spec.latent,
            value_dim=16,
            kv_up=replace(spec.latent.kv_up, stored=(replace(kv_up, outputs=(width,)),)),
        )
        output = replace(spec.output, inputs=spec.num_heads * 16, split_unit=16)
        return replace(spec, latent=latent, output=output)

    first, *others = description.layers
    described = replace(description, layers=(replace(first, attention=narrower(first.attention)), *others))
    chosen = CompiledKernels(compiled.thread_pool()) if kernels == "compiled" else AttentionKind.TORCH
    with pytest.raises(UnsupportedModel, match=r"has latent attention, .* different latent attention"):
        load(directory, described, torch.float32, CPU, chosen)


def test_layers_of_different_query_ranks_are_refused_by_name() -> None:
    config = latent_models.VARIANTS["deepseek-v2"]()
    usual = describe(config)
    config.q_lora_rank *= 2
    other = describe(config)
    assert usual is not None
    assert other is not None
    described = replace(usual, layers=(other.layers[0], *usual.layers[1:]))
    refused = unsupported_natively(described, CompiledKernels(compiled.thread_pool()))
    assert refused is not None
    assert "different latent attention" in refused


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_compiled_kernels_compute_blocks_of_any_size(block_size: int, directory: Path, reference: Generate) -> None:
    runner = make_runner(directory, "compiled", block_size=block_size)
    expected = reference(directory, PROMPTS, NUM_TOKENS)
    assert Driver(runner, chunk=13).generate(PROMPTS, NUM_TOKENS) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cache_dtype", "block_size"), [(None, 16), (torch.int8, 8), (torch.int8, 16)], ids=str)
def test_bits_of_the_compiled_kernels_do_not_depend_on_the_batch(
    directory: Path, dtype: torch.dtype, cache_dtype: torch.dtype | None, block_size: int
) -> None:
    runner = make_runner(directory, "compiled", dtype=dtype, cache_dtype=cache_dtype, block_size=block_size)
    params = SamplingParams(logprobs=VOCAB)
    together, alone = Driver(runner, chunk=11), Driver(runner)
    together.generate(PROMPTS, 4, params)
    for place, prompt in enumerate(PROMPTS, start=1):
        alone.generate([prompt], 4, params)
        assert alone.logprobs[place] == together.logprobs[place]


@pytest.mark.parametrize(
    ("weights", "most"),
    [(MatrixFormat.INT8, 0.1), (MatrixFormat.W8A8, 0.1), (MatrixFormat.W4A16, 0.6), (MatrixFormat.W4A8, 0.6)],
)
def test_weights_of_few_bits_change_little(weights: MatrixFormat, most: float, directory: Path) -> None:
    tops = []
    for each in (MatrixFormat.PLAIN, weights):
        driver = Driver(make_runner(directory, "compiled", weights=each))
        driver.generate([PROMPTS[2]], 1, SamplingParams(logprobs=VOCAB))
        ((reported,),) = driver.logprobs.values()
        tops.append(torch.tensor([value for _, value in sorted(reported.top)]))
    plain, rounded = tops
    assert not torch.equal(plain, rounded)
    assert (plain - rounded).norm() < most * (plain - plain.mean()).norm()


@pytest.mark.parametrize("num_heads", [6, 16, 22])
def test_the_compiled_kernels_compute_dimensions_of_large_models(num_heads: int, save_model: Save) -> None:
    directory = save_model(latent_models.with_real_heads(num_heads))
    by_torch, ours = (_all_logprobs(directory, kernels, torch.float32) for kernels in ("torch", "compiled"))
    torch.testing.assert_close(ours, by_torch, rtol=0, atol=5e-4)


def test_bfloat16_is_as_near_to_float32_by_the_compiled_kernels_as_by_torch(directory: Path) -> None:
    exact, near, ours = (
        _all_logprobs(directory, kernels, dtype)
        for kernels, dtype in (("torch", torch.float32), ("torch", torch.bfloat16), ("compiled", torch.bfloat16))
    )
    assert (ours - exact).norm() < 1.5 * (near - exact).norm()


def _all_logprobs(directory: Path, kernels: str, dtype: torch.dtype) -> Tensor:
    """Log-probabilities of all tokens after each prompt [num_prompts, vocab_size]."""
    driver = Driver(make_runner(directory, kernels, dtype=dtype))
    driver.generate(PROMPTS, 1, SamplingParams(logprobs=VOCAB))
    return torch.tensor([[value for _, value in sorted(of_one[0].top)] for of_one in driver.logprobs.values()])
