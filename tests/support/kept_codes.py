"""Compares layers that are multiplied with their codes with torch's operators, which see them as numbers."""

from pathlib import Path

import torch

from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from tiny_gguf import TOKENS
from worker_svc.step import SamplingParams

_NUM_TOKENS = 4
_EVERY_LOGPROB = SamplingParams(logprobs=len(TOKENS))


def assert_codes_are_multiplied_as_numbers(directory: Path, prompt: list[int], *, atol: float) -> None:
    """Of a model whose vocabulary is `tiny_gguf.TOKENS`: log-probabilities of all tokens differ by at most `atol`."""
    found = []
    for kernels, weights in (("torch", MatrixFormat.PLAIN), ("compiled", MatrixFormat.INT8)):
        driver = Driver(make_runner(directory, kernels, weights=weights, num_blocks=64))
        driver.generate([prompt], _NUM_TOKENS, _EVERY_LOGPROB)
        found.append(torch.tensor([[value for _, value in sorted(step.top)] for step in driver.logprobs[1]]))
    torch.testing.assert_close(*found, rtol=0, atol=atol)
