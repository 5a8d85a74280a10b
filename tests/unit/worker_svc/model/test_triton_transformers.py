"""On a GPU transformers' own modules have plans, graphs and sampling as native models do, and the same tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, PhiConfig

import llama_models
from core_runner import serve_preempted
from large import large_but
from llama_models import SIZES
from prompt_scores import reference_scores, run_prompts, scored
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from runner_steps import Generate
from transformers_models import COMMON, VARIANTS
from worker_svc.errors import UnsupportedModel
from worker_svc.gpu import executor
from worker_svc.gpu.forward_graphs import ForwardGraphs
from worker_svc.gpu.graph_shapes import GraphShape
from worker_svc.gpu.graphs import Work, keep_work
from worker_svc.model import probe, transformers_model
from worker_svc.model.probe import FoundAttention
from worker_svc.runner import Runner
from worker_svc.step import SamplingParams

Save = Callable[..., Path]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = llama_models.prompts(2, 26, 17)
NUM_TOKENS = 4
_TINY: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "dense": lambda: PhiConfig(**_TINY),
    "window": lambda: Gemma2Config(**_TINY, num_key_value_heads=1, head_dim=16, sliding_window=7,
                                   layer_types=["sliding_attention"]),
}  # fmt: skip
"""Small, for the interpreter."""


def _runner(directory: Path, **options: Any) -> Runner:
    return make_runner(directory, "triton", device=DEVICE, native=False, **{"max_sequences": 4, **options})


@pytest.mark.parametrize("variant", ["gpt2", "gemma2", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("cuda_graphs", large_but([False, True], True))
def test_tokens_are_those_of_transformers(
    cuda_graphs: bool, variant: str, save_model: Save, reference: Generate
) -> None:
    """In chunks beside decodes, and each step launched before the one before is finished."""
    directory = save_model(VARIANTS[variant]())
    driver = Driver(_runner(directory, cuda_graphs=cuda_graphs), chunk=9, ahead=1)
    assert driver.generate(PROMPTS, NUM_TOKENS) == reference(directory, PROMPTS, NUM_TOKENS)


def test_decodes_and_mixed_steps_run_as_graphs(save_model: Save) -> None:
    found: list[GraphShape | None] = []
    find = ForwardGraphs.find

    def noted(graphs: ForwardGraphs, batch: Any) -> GraphShape | None:
        found.append(find(graphs, batch))
        return found[-1]

    driver = Driver(_runner(save_model(CONFIGS["dense"]()), cuda_graphs=True), chunk=9)
    with patch.object(ForwardGraphs, "find", noted):
        driver.generate(PROMPTS, NUM_TOKENS)
    assert None not in found
    assert {shape.is_mixed for shape in found if shape is not None} == {False, True}


def test_sampled_tokens_equal_those_of_the_host(save_model: Save) -> None:
    directory = save_model(CONFIGS["dense"]())
    params = [
        SamplingParams(temperature=1.0, seed=-5, top_p=0.9, logprobs=3),
        SamplingParams(temperature=0.8, seed=2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=0),
        SamplingParams(presence_penalty=1.5, logit_bias={5: 4.0, 6: -100.0}, min_tokens=3, suppressed_token_ids=(5,)),
    ]
    on_host = Driver(make_runner(directory, native=False))
    driver = Driver(_runner(directory, cuda_graphs=True), chunk=9, ahead=1)
    assert driver.generate(PROMPTS, 6, params) == on_host.generate(PROMPTS, 6, params)
    for sequence_id, expected in on_host.logprobs.items():
        for reported, by_host in zip(driver.logprobs[sequence_id], expected, strict=True):
            assert reported.logprob == pytest.approx(by_host.logprob, abs=1e-4)


def test_log_probabilities_of_prompts_are_those_of_transformers(save_model: Save) -> None:
    directory = save_model(CONFIGS["window"]())
    new = [scored(place, prompt, 2 * place, logprobs=1) for place, prompt in enumerate(PROMPTS)]
    for (logprobs, _), prompt in zip(run_prompts(_runner(directory), new, 7), PROMPTS, strict=True):
        expected = reference_scores(directory, prompt)
        wanted = [float(expected[row, token]) for row, token in enumerate(prompt[1:])]
        assert [one.logprob for one in logprobs] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_tokens_stay_the_same_with_cached_prefixes_and_preempted(
    preemption: str, save_model: Save, reference: Generate
) -> None:
    directory = save_model(CONFIGS["window"]())
    shared, first, second, *others = llama_models.prompts(9, 1, 6, 7, 7)
    asked = [*others, [*shared, *first], [*shared, *second]]
    runner = _runner(directory, block_size=8, num_blocks=3, num_host_blocks=16)
    served = serve_preempted(make_instance(runner), 3, preemption, asked, 3)
    assert [one.token_ids for one in served] == reference(directory, asked, 3)


def test_modules_that_wait_for_the_device_run_without_graphs_and_say_why(
    save_model: Save, reference: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    """A dynamic rotation looks at the positions of each step."""
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    directory = save_model(LlamaConfig(**SIZES, rope_parameters=rope))
    with caplog.at_level("INFO", logger="worker_svc.gpu.executor"):
        runner = _runner(directory, cuda_graphs=True)
    (message,) = (one.message for one in caplog.records if one.name == "worker_svc.gpu.executor")
    assert message == (
        "only sampling runs as CUDA graphs: the modules of transformers wait for the device in "
        "aten::_local_scalar_dense"
    )
    prompts = PROMPTS[:2]
    assert Driver(runner, chunk=9, ahead=1).generate(prompts, 3) == reference(directory, prompts, 3)


def test_layers_with_different_numbers_of_query_heads_are_refused_by_name(
    save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(CONFIGS["dense"]())

    def found(model: Any) -> FoundAttention:
        return replace(probe.probe(model), num_heads=(2, 4))

    monkeypatch.setattr(transformers_model, "probe", found)
    with pytest.raises(UnsupportedModel, match=r"different numbers of query heads \(2, 4\)"):
        _runner(directory)
    make_runner(directory, native=False)


def _fail_once(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first capture of a worker that starts raises an error."""
    errors = [RuntimeError(message)]

    def capture(work: Work) -> Work:
        if errors:
            raise errors.pop()
        return keep_work(work)

    monkeypatch.setattr(executor, "_capture_for", lambda device: capture)


def test_modules_that_cannot_be_captured_run_without(
    save_model: Save, reference: Generate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_model(CONFIGS["dense"]())
    _fail_once("operation not permitted when stream is capturing", monkeypatch)
    with caplog.at_level("INFO", logger="worker_svc.gpu.executor"):
        runner = _runner(directory, cuda_graphs=True)
    (message,) = (one.message for one in caplog.records if one.name == "worker_svc.gpu.executor")
    assert message == (
        "only sampling runs as CUDA graphs: the modules of transformers cannot be captured: "
        "operation not permitted when stream is capturing"
    )
    prompts = PROMPTS[:2]
    assert Driver(runner, chunk=9, ahead=1).generate(prompts, 3) == reference(directory, prompts, 3)


def test_another_error_of_a_capture_is_raised(save_model: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_once("QUIRE_ATTENTION_BACKEND is reference, whose plan failed", monkeypatch)
    with pytest.raises(RuntimeError, match="whose plan failed"):
        _runner(save_model(CONFIGS["dense"]()), cuda_graphs=True)
