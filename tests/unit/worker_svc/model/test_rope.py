"""Frequencies of rotary positions are those of transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llama_models import SIZES
from worker_svc.model.architecture import describe
from worker_svc.model.rope import inverse_frequencies, rope_of

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **_LLAMA3},
        _YARN,
        {**_YARN, "factor": None, "original_max_position_embeddings": 64},
        {**_YARN, "factor": 0.5},
        {**_YARN, "attention_factor": 1.7},
        {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**_YARN, "beta_fast": 64, "beta_slow": 2, "truncate": False},
        {**_YARN, "beta_fast": 1, "beta_slow": 1, "truncate": False},
    ],
    ids=str,
)
def test_frequencies_and_attention_factor(rope: dict[str, Any]) -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, **rope})
    description = describe(config)
    assert description is not None
    native = rope_of(description)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(native, description.layout.head_dim), expected)
    assert native.attention_factor == pytest.approx(factor)
