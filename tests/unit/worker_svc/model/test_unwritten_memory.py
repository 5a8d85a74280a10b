"""Nothing that is computed depends on memory that nothing has written: here it is NaN."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from llama_models import prompts
from runner_driver import Driver, make_runner
from transformers_models import VARIANTS

PROMPTS = prompts(1, 17, 40)


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, torch refuses products in this mode")
@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("kernels", ["torch", "compiled", "triton"])
@pytest.mark.parametrize("variant", ["gemma2", "olmoe", "gpt-oss"])
def test_tokens_are_those_of_transformers(
    variant: str, kernels: str, save_model: Callable[..., Path], reference: Callable[..., list[list[int]]]
) -> None:
    config = VARIANTS[variant]()
    config.vocab_size = 128  # so that a whole chunk of logits is NaN, of which the interpreter warns
    directory = save_model(config)
    runner = make_runner(directory, kernels)
    assert Driver(runner).generate(PROMPTS, 3) == reference(directory, PROMPTS, 3)
