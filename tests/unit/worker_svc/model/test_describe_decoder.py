"""Fields of a config have the effect that they have in transformers' code of an architecture, and often none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    Jais2Config,
    LlamaConfig,
    MiniMaxM2Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from llama_models import prompts
from runner_driver import Driver, make_runner
from transformers_models import COMMON, CONTEXT, VOCAB
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.step import SamplingParams

Save = Callable[..., Path]
WINDOW = 7
_SIZES: dict[str, Any] = {
    **COMMON, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_KINDS = ["full_attention", "sliding_attention"]


def _with(directory: Path, **fields: Any) -> Path:
    """The model with other fields in its config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def _assert_log_probabilities_are_those_of_transformers(directory: Path) -> None:
    (prompt,) = prompts(40)
    driver = Driver(make_runner(directory))
    (sampled,) = driver.generate([prompt], 2, SamplingParams(logprobs=VOCAB))
    ours = torch.tensor([[value for _, value in sorted(step.top)] for step in driver.logprobs[1]])
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)


CONFIGS: dict[str, tuple[Callable[[], Any], list[int | None]]] = {
    "llama": (lambda: LlamaConfig(**_SIZES), [None, None]),
    "olmoe": (lambda: OlmoeConfig(**_SIZES, **_EXPERTS), [None, None]),
    "phi3": (lambda: Phi3Config(**_SIZES), [WINDOW, WINDOW]),
    "mixtral": (lambda: MixtralConfig(**_SIZES, num_local_experts=4), [WINDOW, WINDOW]),
    "qwen3_moe": (lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, moe_intermediate_size=32), [WINDOW, WINDOW]),
    "qwen2": (lambda: Qwen2Config(**_SIZES), [None, WINDOW]),
    "cohere": (lambda: CohereConfig(**_SIZES), [None, None]),
    "cohere2": (lambda: Cohere2Config(**_SIZES), [None, WINDOW]),
    "dots1": (
        lambda: Dots1Config(**_SIZES, **_ROUTED),
        [None, WINDOW],
    ),
    "glm": (lambda: GlmConfig(**_SIZES, head_dim=16), [None, None]),
    "phi": (lambda: PhiConfig(**_SIZES), [None, None]),
    "glm4": (lambda: Glm4Config(**_SIZES, head_dim=16), [None, None]),
    "glm4_moe": (lambda: Glm4MoeConfig(**_SIZES, **_ROUTED), [None, None]),
    "ernie4_5": (lambda: Ernie4_5Config(**_SIZES, head_dim=16), [None, None]),
    "ernie4_5_moe": (
        lambda: Ernie4_5_MoeConfig(**_SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
        [None, None],
    ),
    "exaone_moe": (
        lambda: ExaoneMoeConfig(
            **_SIZES, **_EXPERTS, moe_intermediate_size=32, sliding_window=WINDOW, layer_types=_KINDS[::-1]
        ),
        [None, WINDOW],
    ),
    "granitemoe": (lambda: GraniteMoeConfig(**_SIZES, num_local_experts=4, attention_multiplier=0.25), [None, None]),
    "hunyuan_v1_moe": (lambda: HunYuanMoEV1Config(**_SIZES, head_dim=16, num_experts=4, moe_topk=2), [None, None]),
    "minimax_m2": (
        lambda: MiniMaxM2Config(**_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        [None, None],
    ),
    "nemotron": (lambda: NemotronConfig(**_SIZES), [None, None]),
    "stablelm": (lambda: StableLmConfig(**_SIZES), [None, None]),
    "starcoder2": (lambda: Starcoder2Config(**_SIZES), [WINDOW, WINDOW]),
    "gemma": (lambda: GemmaConfig(**_SIZES, head_dim=16), [None, None]),
    "smollm3": (lambda: SmolLM3Config(**_SIZES), [None, WINDOW]),
    "olmo2": (lambda: Olmo2Config(**_SIZES), [None, None]),
    "olmo3": (lambda: Olmo3Config(**_SIZES), [None, WINDOW]),
    "granite": (lambda: GraniteConfig(**_SIZES), [None, None]),
    "hyperclovax": (lambda: HyperCLOVAXConfig(**_SIZES), [None, None]),
    "seed_oss": (lambda: SeedOssConfig(**_SIZES, head_dim=16), [None, None]),
    "arcee": (lambda: ArceeConfig(**_SIZES), [None, None]),
    "jais2": (lambda: Jais2Config(**_SIZES), [None, None]),
    "ministral": (lambda: MinistralConfig(**_SIZES, head_dim=16), [None, WINDOW]),
    "cwm": (lambda: CwmConfig(**_SIZES | {"bos_token_id": 0}, head_dim=16), [None, WINDOW]),
    "exaone4": (lambda: Exaone4Config(**_SIZES), [None, WINDOW]),
    "hunyuan_v1_dense": (lambda: HunYuanDenseV1Config(**_SIZES, head_dim=16), [None, None]),
    "helium": (lambda: HeliumConfig(**_SIZES, head_dim=16), [None, None]),
}
"""With the windows of their layers, if the config has all fields that describe windows."""


@pytest.mark.parametrize("model_type", CONFIGS)
def test_windows_are_those_that_transformers_applies(model_type: str, save_model: Save) -> None:
    make, windows = CONFIGS[model_type]
    fields = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "layer_types": _KINDS}
    directory = _with(save_model(make()), **fields)
    described = describe(read_config(directory))
    assert described is not None
    assert [layer.attention.window for layer in described.layers] == windows
    _assert_log_probabilities_are_those_of_transformers(directory)


def test_a_window_of_no_keys_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="window: must be above 0"):
        describe(MistralConfig(**_SIZES, sliding_window=0))


def test_an_mlp_of_no_width_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="width: must be above 0"):
        describe(MistralConfig(**_SIZES | {"intermediate_size": 0}))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LlamaConfig(**_SIZES), "hidden_activation"),
        (lambda: Gemma2Config(**_SIZES, head_dim=16), "hidden_act"),
        (lambda: Gemma3TextConfig(**_SIZES, head_dim=16), "hidden_act"),
    ],
    ids=["llama", "gemma2", "gemma3"],
)
def test_the_activation_is_that_of_the_field_which_transformers_reads(
    make: Callable[[], Any], field: str, save_model: Save
) -> None:
    _assert_log_probabilities_are_those_of_transformers(_with(save_model(make()), **{field: "relu"}))


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (0, 7), (1, 0)])
def test_layers_of_experts_may_begin_and_end_outside_of_the_model(first: int, last: int, save_model: Save) -> None:
    make, _ = CONFIGS["ernie4_5_moe"]
    config = make()
    config.update({"moe_layer_start_index": first, "moe_layer_end_index": last})
    _assert_log_probabilities_are_those_of_transformers(save_model(config))


_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_FACTORS = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    ("rope", "original", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 32, CONTEXT),
        ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 32, CONTEXT),
        ({"rope_type": "longrope", **_FACTORS}, 64, 64),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_the_original_context_may_be_beside_the_rope_parameters(
    rope: dict[str, Any], original: int, context: int, save_model: Save
) -> None:
    directory = _with(
        save_model(LlamaConfig(**_SIZES)),
        rope_parameters={"rope_theta": 500.0, **rope},
        original_max_position_embeddings=original,
    )
    described = describe(read_config(directory))
    assert described is not None
    assert described.context_length == context
    _assert_log_probabilities_are_those_of_transformers(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta: must be a number above 0, not None"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta: must be a number above 0, not 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}},
            "rope_theta: must be other than 1",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor: must be a number above 0, not -2.0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.0}}, "factor: must be a number above 0, not 0.0"),
        ({"rope_parameters": {**_YARN, "attention_factor": -1.0}}, "attention_factor: must be a number above 0, not"),
        ({"rope_parameters": {**_YARN, "attention_factor": "x"}}, "attention_factor: must be a number above 0, not 'x"),
        ({"rope_parameters": {**_YARN, "attention_factor": float("nan")}}, "attention_factor: must be a number above"),
        ({"rope_parameters": {**_YARN, "beta_fast": -1.0}}, "beta_fast: must be a number above 0, not -1.0"),
        ({"rope_parameters": {**_YARN, "rope_theta": float("inf")}}, "rope_theta: must be a number above 0, not inf"),
        ({"rope_parameters": {**_YARN, "partial_rotary_factor": "x"}}, "partial_rotary_factor: must be a number above"),
        ({"rope_parameters": {**_YARN, "mscale": -1.0, "mscale_all_dim": 1.0}}, "mscale: must be a number above 0"),
        ({"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": "1"}}, "mscale_all_dim: must be a number abov"),
        (
            {"rope_parameters": {**_LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor: must be above low_freq_factor, which is 4.0, not 4.0",
        ),
        ({"rope_parameters": {**_LLAMA3, "low_freq_factor": True}}, "low_freq_factor: must be a number above 0, not T"),
        ({"rope_parameters": {**_LLAMA3, "high_freq_factor": float("nan")}}, "high_freq_factor: must be a number abo"),
        ({"num_key_value_heads": -1}, "num_heads: must be above 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: must be a number above 0, not 0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "config.json: transformers refuses it: .*Missing.*'factor'"),
    ],
    ids=str,
)
def test_positions_that_cannot_be_computed_are_refused_by_the_field(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    LlamaConfig(**_SIZES).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        describe(read_config(_with(tmp_path, **fields)))


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
def test_an_epsilon_with_which_no_norm_can_be_computed_is_refused(eps: float, tmp_path: Path) -> None:
    LlamaConfig(**_SIZES).save_pretrained(tmp_path)
    message = f"model.layers.0.input_layernorm.weight: must be of an epsilon of 0 or more, not {eps}"
    with pytest.raises(UnsupportedModel, match=message):
        describe(read_config(_with(tmp_path, rms_norm_eps=eps)))
