"""Runs of a class with vLLM's interface, in a process of its own."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.offline.runs import OfflineRun, OfflineSystem, run_offline, vllm
from benchmarks.processes import BenchmarkFailed
from quire_client.bench.mix import MixRequest

PACKAGE = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert (temperature, ignore_eos) == (0, True)
        self.max_tokens = max_tokens
class One:
    pass
class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs=None):
        assert (dtype, max_model_len) == ("bfloat16", 2048)
        print("a line of a log")
        assert max_num_seqs == (8 if model == "eight" else None)
        self.model = model
    def generate(self, prompts, params, use_tqdm):
        if self.model == "short":
            params[0].max_tokens -= 1
        outputs = []
        for prompt, one in zip(prompts, params, strict=True):
            sequence, output = One(), One()
            sequence.token_ids = tuple(prompt["prompt_token_ids"][:1] * one.max_tokens)
            output.outputs = [sequence]
            outputs.append(output)
        return outputs
"""
REQUESTS = [MixRequest((5, 6), 3), MixRequest((7,), 2)]


@pytest.fixture
def system(tmp_path: Path) -> OfflineSystem:
    """A package with the interface, under vLLM's name."""
    (tmp_path / "vllm.py").write_text(PACKAGE)
    options = "--package", "vllm"
    return OfflineSystem("vllm", "scripted", Path(sys.executable), {"PYTHONPATH": str(tmp_path)}, options=options)


def test_a_run_has_the_tokens_and_the_time_of_one_call(system: OfflineSystem) -> None:
    run = run_offline(system, Path("model"), REQUESTS)
    assert run.token_ids == [[5, 5, 5], [7, 7]]
    assert run.tokens_per_second == 5 / run.seconds > 0
    assert OfflineRun(2.0, [[1, 2], [3]]).tokens_per_second == 1.5


def test_a_run_may_limit_the_sequences_at_a_time(system: OfflineSystem) -> None:
    assert run_offline(system, Path("eight"), REQUESTS, 8).token_ids == [[5, 5, 5], [7, 7]]


@pytest.mark.parametrize(
    ("package", "model", "text"),
    [("vllm", "short", "outputs of other lengths"), ("quire", "/nowhere/at/all", "scripted ended with status 1")],
)
def test_a_run_that_fails_says_why(package: str, model: str, text: str, system: OfflineSystem) -> None:
    failing = replace(system, package=package, options=("--package", package))
    with pytest.raises(BenchmarkFailed, match=text):
        run_offline(failing, Path(model), REQUESTS)


def test_a_system_has_a_program_and_options_of_its_own(system: OfflineSystem, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "options = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "ids = [[int(options['--first'])] * count for _, count in json.load(open(options['--requests']))]\n"
        "json.dump({'seconds': 1.0, 'token_ids': ids}, open(options['--output'], 'w'))\n"
    )
    chosen = replace(system, program=program).with_options("--first", "4")
    assert run_offline(chosen, Path("model"), REQUESTS).token_ids == [[4, 4, 4], [4, 4]]


def test_vllm_is_that_of_an_environment() -> None:
    system = vllm(Path("/venv"))
    assert (str(system.python), system.package) == (os.path.join("/venv", "bin", "python"), "vllm")
