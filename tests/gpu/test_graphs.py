"""On a GPU: captured decodes and steps launched ahead sample the same tokens as eager steps in turn."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import latent_models
import llama_models
import transformers_models
from runner_driver import Driver, make_runner
from worker_svc.gpu.graph_shapes import capture_sizes
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.2, frequency_penalty=0.2,
                         min_tokens=4, suppressed_token_ids=(1, 2), logit_bias={3: 2.0}, logprobs=4)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return llama_models.save_model(tmp_path, llama_models.VARIANTS["llama"]())


def _driver(directory: Path, *, cuda_graphs: bool, ahead: int, max_sequences: int = 12) -> Driver:
    runner = make_runner(
        directory, "triton", device="cuda", cuda_graphs=cuda_graphs, max_sequences=max_sequences, num_blocks=128
    )
    return Driver(runner, chunk=8, ahead=ahead)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_tokens_are_those_of_transformers(cuda_graphs: bool, ahead: int, directory: Path) -> None:
    asked = llama_models.prompts(1, 15, 16, 17, 33, 64)
    driver = _driver(directory, cuda_graphs=cuda_graphs, ahead=ahead)
    # Twice, so that the second run reuses blocks and slots of the first one
    for _ in range(2):
        assert driver.generate(asked, 24) == llama_models.generate(directory, asked, 24, "cuda")


@pytest.mark.parametrize("ahead", [0, 1])
def test_graphs_and_steps_launched_ahead_sample_the_tokens_of_eager_steps(ahead: int, directory: Path) -> None:
    asked = llama_models.prompts(1, 5, 9, 17, 33, 2, 3)
    every = [replace(SAMPLED, seed=seed) for seed in range(len(asked))]
    eager = _driver(directory, cuda_graphs=False, ahead=0)
    captured = _driver(directory, cuda_graphs=True, ahead=ahead)
    assert captured.generate(asked, 40, every) == eager.generate(asked, 40, every)
    for sequence_id, expected in eager.logprobs.items():
        for by_graph, by_eager in zip(captured.logprobs[sequence_id], expected, strict=True):
            assert by_graph.logprob == pytest.approx(by_eager.logprob, abs=1e-4)
            assert dict(by_graph.top) == pytest.approx(dict(by_eager.top), abs=1e-4)


@pytest.mark.parametrize("variant", ["gpt2", "phi", "gemma2", "mixtral"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_modules_of_transformers_have_the_tokens_of_transformers(
    ahead: int, variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By graphs where the modules do not wait for the device."""
    directory = llama_models.save_model(tmp_path, transformers_models.VARIANTS[variant]())
    asked = llama_models.prompts(1, 15, 16, 17, 33, 64)
    with caplog.at_level("INFO", logger="worker_svc.gpu.executor"):
        runner = make_runner(
            directory, "triton", device="cuda", cuda_graphs=True, max_sequences=12, num_blocks=128, native=False
        )
    if variant != "mixtral":  # whose experts may wait, by the version of transformers
        messages = [one.message for one in caplog.records if one.name == "worker_svc.gpu.executor"]
        assert messages == [], "nothing in these modules waits"
    expected = llama_models.generate(directory, asked, 24, "cuda")
    assert Driver(runner, chunk=8, ahead=ahead).generate(asked, 24) == expected


@pytest.mark.parametrize("num_sequences", [*capture_sizes(12), 3, 5, 7, 9, 11])
def test_every_batch_size_decodes_as_transformers_does(num_sequences: int, directory: Path) -> None:
    asked = llama_models.prompts(*range(2, 2 + num_sequences))
    driver = _driver(directory, cuda_graphs=True, ahead=1)
    assert driver.generate(asked, 8) == llama_models.generate(directory, asked, 8, "cuda")


@pytest.mark.parametrize(
    "variant",
    [
        *(
            "gpt2",
            "opt",
            "gpt-neox",
            "phi3",
            "gemma2",
            "gemma3",
            "mixtral",
            "qwen2-moe",
            "qwen3-moe",
            "olmoe",
            "gpt-oss",
        ),
        *("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"),
    ],
)
def test_every_architecture_decodes_in_graphs_as_transformers_does(variant: str, tmp_path: Path) -> None:
    variants = transformers_models.VARIANTS | latent_models.VARIANTS
    directory = llama_models.save_model(tmp_path, variants[variant]())
    asked = llama_models.prompts(1, 17, 33)
    driver = _driver(directory, cuda_graphs=True, ahead=1, max_sequences=4)
    assert driver.generate(asked, 12) == llama_models.generate(directory, asked, 12, "cuda")


def test_layers_of_different_heads_decode_in_graphs_as_transformers_does(tmp_path: Path) -> None:
    models = pytest.importorskip("dense_models", exc_type=ImportError).VARIANTS
    directory = llama_models.save_model(tmp_path, models["gemma4-small"]())
    asked = llama_models.prompts(1, 17, 33)
    driver = _driver(directory, cuda_graphs=True, ahead=1, max_sequences=4)
    assert driver.generate(asked, 12) == llama_models.generate(directory, asked, 12, "cuda")


def test_rows_that_only_fill_up_write_nothing(directory: Path) -> None:
    runner = make_runner(directory, "triton", device="cuda", cuda_graphs=True, max_sequences=8, num_blocks=16)
    asked = llama_models.prompts(1, 1, 1)
    new = [NewSequence(row, prompt, 1, 0, SamplingParams()) for row, prompt in enumerate(asked)]
    sampled: list[list[int]] = [[], [], []]
    for start in range(6):
        scheduled = [ScheduledSequence(row, start, 1, [row] if start == 0 else []) for row in range(3)]
        for row, result in enumerate(runner.step(Step([], new, scheduled)).sequences):
            sampled[row] += result.token_ids
        new = []
    assert sampled == llama_models.generate(directory, asked, 6, "cuda")


def test_a_launch_returns_before_the_step_before_it_is_done(directory: Path) -> None:
    runner = make_runner(directory, "triton", device="cuda", cuda_graphs=True, max_sequences=4)
    (prompt,) = llama_models.prompts(20)
    runner.step(Step([], [NewSequence(1, prompt, 20, 0, SAMPLED)], [ScheduledSequence(1, 0, 20, [0, 1])]))
    for start in (20, 22):  # the first pair compiles what is compiled late
        # The device is busy for some time, and neither of the two launches waits for it.
        torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
        steps = [runner.launch(Step([], [], [ScheduledSequence(1, start + step, 1, [])])) for step in range(2)]
        waited = [step.is_done() for step in steps]
        results = [runner.finish(step).sequences[0] for step in steps]
        assert all(len(result.token_ids) == 1 for result in results)
    assert waited == [False, False]
