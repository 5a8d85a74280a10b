"""Log-probabilities of a text through the runner are the model's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import llama_models
from benchmarks.quality import Window, score, windows_of
from runner_driver import make_runner


def test_each_token_beyond_the_first_half_window_is_scored_once() -> None:
    tokens = list(range(23))
    scored = [token for window in windows_of(tokens, 8) for token in window.tokens[window.num_given :]]
    assert scored == tokens[4:]
    assert all(len(window.tokens) <= 8 and window.num_given == 4 for window in windows_of(tokens, 8))


@pytest.mark.parametrize("max_step_tokens", [5, 512])
def test_scores_are_the_models_own(tmp_path: Path, max_step_tokens: int) -> None:
    directory = llama_models.save_model(tmp_path, llama_models.VARIANTS["llama"]())
    tokens = torch.randint(llama_models.VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    windows = [Window(tokens[:25], 12), Window(tokens[12:], 12)]
    scored = score(make_runner(directory, max_step_tokens=max_step_tokens), windows)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected: list[tuple[int, float]] = []
    for window in windows:
        with torch.no_grad():
            logprobs = model(torch.tensor([list(window.tokens)])).logits[0].log_softmax(-1)
        places = range(window.num_given, len(window.tokens))
        expected += [(place, float(logprobs[place - 1, window.tokens[place]])) for place in places]
    assert scored == pytest.approx([logprob for _, logprob in sorted(expected, key=lambda item: item[0])], abs=1e-4)
