"""Frequencies of rotary positions are those of transformers; layers share what is computed of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llama_models import SIZES
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.rope import LayerRopes, Rotation, layer_ropes, query_factors_of_context

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0 + pair / 8 for pair in range(12)]}
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
    (native,) = layer_ropes(description).distinct
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(native.frequencies(), expected)
    assert native.config.attention_factor == pytest.approx(factor)


def test_a_long_context_takes_no_memory_where_queries_stay() -> None:
    description = describe(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}))
    assert description is not None
    (rope,) = layer_ropes(description).distinct
    assert query_factors_of_context(rope.config, 2**60) is None  # 2^63 bytes of positions


@pytest.mark.parametrize("given", [{}, {"factor": 3.0}, {"attention_factor": 1.7}], ids=str)
def test_longrope_has_the_short_factors_of_the_part_that_is_rotated(given: dict[str, Any]) -> None:
    rope = {**_LONGROPE, "rope_theta": 500.0, "partial_rotary_factor": 0.75, "long_factor": [4.0] * 12, **given}
    config = Phi3Config(
        hidden_size=96, num_attention_heads=3, intermediate_size=80, num_hidden_layers=2, vocab_size=97,
        max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=rope, pad_token_id=None,
    )  # fmt: skip
    description = describe(config)
    assert description is not None
    assert description.context_length == 64
    (native,) = layer_ropes(description).distinct
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
    assert (native.config.rotated_dims, len(expected)) == (24, 12)
    torch.testing.assert_close(native.frequencies(), expected)
    assert native.config.attention_factor == pytest.approx(factor)
    assert (factor == 1.7) == ("attention_factor" in given)


def test_factors_of_another_number_than_that_of_the_pairs_are_refused() -> None:
    rope = {**_LONGROPE, "rope_theta": 500.0, "factor": 2.0, "long_factor": [4.0] * 12}
    with pytest.raises(UnsupportedModel, match="short_factor: must be 32 numbers"):
        describe(LlamaConfig(**SIZES, rope_parameters=rope))


def test_a_part_of_a_head_is_rotated_and_the_rest_stays() -> None:
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=2, intermediate_size=80, num_hidden_layers=1)
    description = describe(config)
    assert description is not None
    (rope,) = layer_ropes(description).distinct
    frequencies = rope.frequencies()
    assert len(frequencies) == 4
    heads = torch.randn(3, 2, 32)
    positions = torch.tensor([0, 1, 70])
    rotated = Rotation(positions, frequencies, torch.float32)(heads)
    assert torch.equal(rotated[..., 8:], heads[..., 8:])
    whole = Rotation(positions, frequencies, torch.float32)(heads[..., :8].contiguous())
    assert torch.equal(rotated[..., :8], whole)
    assert not torch.allclose(rotated[1:, :, :8], heads[1:, :, :8])


def test_layers_name_which_of_the_distinct_positions_they_have() -> None:
    config = Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 3}, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    description = describe(config)
    assert description is not None
    ropes = layer_ropes(description)
    assert ([rope.config.theta for rope in ropes.distinct], ropes.of_layers) == ([10_000.0, 1_000_000.0], (0, 1, 0))
    first, *others = description.layers
    without = replace(description, layers=(replace(first, attention=replace(first.attention, rope=None)), *others))
    assert layer_ropes(without) == LayerRopes(tuple(reversed(ropes.distinct)), (None, 0, 1))
