"""Models that also take images: all backends compute of text what transformers' classes with images compute."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageTextToText, FalconConfig

import compiled
import image_models
from core_runner import serve_preempted
from image_models import VARIANTS
from llama_models import hidden_states, prompts, save_model
from quantized_models import quantize_fp8, save_quantized
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from transformers_models import VOCAB
from worker_svc.compressed_writer import scheme_named
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_states import load_compiled_states
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription
from worker_svc.quantize import quantize_model
from worker_svc.step import SamplingParams

EVERY_LOGPROB = SamplingParams(logprobs=VOCAB)
BLOCK, NUM_TOKENS = 8, 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SHARED, *_LONGER = prompts(19, 1, 7, 8, 15, 33)
PROMPTS = [*_LONGER, *([*_SHARED, *prompt] for prompt in _LONGER[:3])]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=VARIANTS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each variant."""
    return image_models.save(tmp_path_factory.mktemp("model"), VARIANTS[request.param]())


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return image_models.generate(directory, PROMPTS, NUM_TOKENS)


def _describe(directory: Path) -> ModelDescription:
    description = describe(read_config(directory))
    assert description is not None
    return description


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("chunk", [512, 7])
def test_tokens_are_those_of_generate(kernels: str, chunk: int, directory: Path, expected: list[list[int]]) -> None:
    runner = make_runner(directory, kernels, block_size=BLOCK, num_blocks=128)
    assert Driver(runner, chunk).generate(PROMPTS, NUM_TOKENS) == expected
    assert len({token for tokens in expected for token in tokens}) > 4  # a model that repeats one token shows nothing


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_tokens_stay_the_same_with_cached_prefixes_and_preempted(
    kernels: str, directory: Path, expected: list[list[int]]
) -> None:
    runner = make_runner(directory, kernels, block_size=BLOCK, num_blocks=12, num_host_blocks=64)
    served = serve_preempted(make_instance(runner), 12, "swap", PROMPTS, NUM_TOKENS)
    assert [one.token_ids for one in served] == expected


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_log_probabilities_are_those_of_transformers_to_the_end_of_the_context(kernels: str, directory: Path) -> None:
    (prompt,) = prompts(70)
    runner = make_runner(directory, kernels)
    driver = Driver(runner, chunk=33)
    (sampled,) = driver.generate([prompt], runner.limits.context_length - len(prompt), EVERY_LOGPROB)
    torch.testing.assert_close(_reported(driver), _expected(directory, prompt, sampled), rtol=0, atol=5e-4)


def _expected(directory: Path, prompt: list[int], sampled: list[int]) -> torch.Tensor:
    """Log-probabilities [num_sampled, vocab_size] by transformers."""
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def _reported(driver: Driver) -> torch.Tensor:
    """The same as a driver's first sequence reported them."""
    return torch.tensor([[value for _, value in sorted(step.top)] for step in driver.logprobs[1]])


def _save(directory: Path, variant: str, **options: Any) -> Path:
    return image_models.save(directory, VARIANTS[variant](), **options)


def _renamed(*changes: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    """With other first parts of names, of each name the first that fits."""

    def rename(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in changes if name.startswith(old)), name)

    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def _transposed(tensors: Tensors) -> Tensors:
    return {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
    }


def _with_unused_keys(tensors: Tensors) -> Tensors:
    """As Google published E2B and E4B: with keys and values of layers that read other layers' ones."""
    prefix = "model.language_model.layers."
    stored = {name: value for name, value in tensors.items() if name.startswith(f"{prefix}0.self_attn.")}
    kinds = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    more = {
        f"{prefix}{layer}.self_attn.{kind}": stored[f"{prefix}0.self_attn.{kind}"].clone()
        for layer in (3, 4)
        for kind in kinds
    }
    assert not more.keys() & tensors.keys()
    return tensors | more


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# As transformers wrote them from 4.52 to 5.0; before that, as today.
_LATER = _renamed(
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("image_newline", "model.image_newline"),
)
LAYOUTS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "a later Gemma 3": ("gemma3", _LATER),
    "a later LLaVA-NeXT": ("llava-next", _LATER),
    "a later Qwen2.5-VL": (
        "qwen2.5-vl",
        _renamed(("model.", "model.language_model."), ("visual.", "model.visual.")),
    ),
    "Qwen's own experts": ("qwen3-vl-moe", _transposed),
    "Google's own Gemma 4": ("gemma4", _with_unused_keys),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_of_checkpoints_load(layout: str, tmp_path: Path) -> None:
    variant, change = LAYOUTS[layout]
    _save(tmp_path, variant)
    path, asked = tmp_path / "model.safetensors", prompts(9, 20)
    before = image_models.generate(tmp_path, asked, 4)
    stored = load_file(path)
    tensors = change(stored)
    assert _shapes(tensors) != _shapes(stored)
    save_file(tensors, path, metadata={"format": "pt"})
    assert image_models.generate(tmp_path, asked, 4) == before
    assert Driver(make_runner(tmp_path)).generate(asked, 4) == before


@pytest.mark.parametrize(
    "variant", ["gemma3", "gemma4-unified", "qwen2.5-vl", "qwen3-vl-moe", "llava-next", "idefics3"]
)
def test_tensors_by_the_names_of_transformers_modules_load(variant: str, tmp_path: Path) -> None:
    _save(tmp_path, variant, save_original_format=False)
    asked = prompts(9, 20)
    assert Driver(make_runner(tmp_path)).generate(asked, 4) == image_models.generate(tmp_path, asked, 4)


@pytest.mark.parametrize("variant", ["gemma3", "gemma4", "mistral3", "qwen2-vl", "qwen3-vl-moe"])
@torch.inference_mode()
def test_the_class_without_a_head_computes_states(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant](), AutoModel)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("Model")
    states = load_compiled_states(_describe(tmp_path), tmp_path, torch.float32, compiled.thread_pool())
    crowd = prompts(3, 40)
    for prompt, found in zip(crowd, states(crowd), strict=True):
        torch.testing.assert_close(found, hidden_states(tmp_path, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["qwen2-vl", "qwen2.5-vl", "qwen2.5-vl-tied"])
def test_a_config_may_have_the_fields_of_the_text_model_at_its_top(variant: str, tmp_path: Path) -> None:
    """As Qwen published Qwen2-VL and Qwen2.5-VL."""
    _save(tmp_path, variant)
    described, path = _describe(tmp_path), tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    path.write_text(json.dumps({**text, **config, "rope_theta": 500.0}))
    assert _describe(tmp_path) == described


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_a_head_of_its_own_is_used_where_the_config_ties_by_default(kernels: str, tmp_path: Path) -> None:
    """As Mistral Small 3.1 has it."""
    _save(tmp_path, "mistral3")
    path, asked = tmp_path / "config.json", prompts(9, 20)
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    path.write_text(json.dumps(config))
    assert _describe(tmp_path).tied_embeddings
    expected = image_models.generate(tmp_path, asked, 4)
    assert Driver(make_runner(tmp_path, kernels)).generate(asked, 4) == expected


@pytest.mark.parametrize("kernels", ["torch", "compiled", "triton"])
def test_queries_of_ministral_3_grow_with_their_positions(kernels: str, tmp_path: Path) -> None:
    config = VARIANTS["mistral3-ministral"]()
    config.text_config.rope_parameters["original_max_position_embeddings"] = 4
    image_models.save(tmp_path, config)
    description = _describe(tmp_path)
    driver = Driver(make_runner(tmp_path, kernels, device=DEVICE if kernels == "triton" else "cpu"), chunk=9)
    (prompt,) = prompts(21)
    (sampled,) = driver.generate([prompt], 4, EVERY_LOGPROB)
    torch.testing.assert_close(_reported(driver), _expected(tmp_path, prompt, sampled), rtol=0, atol=5e-4)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, query_beta=0.0)))
        for layer in description.layers
        if layer.attention.rope is not None
    )
    unscaled = Driver(make_runner(tmp_path, description=replace(description, layers=layers)))
    unscaled.generate([prompt], 1, EVERY_LOGPROB)
    assert (_reported(unscaled)[0] - _reported(driver)[0]).abs().max() > 1e-2


def test_ministral_3_without_the_numbers_of_its_factor_is_not_described() -> None:
    for name in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        config = VARIANTS["mistral3-ministral"]()
        config.text_config.rope_parameters |= {"rope_type": "default"}
        assert describe(config) is not None
        del config.text_config.rope_parameters[name]
        assert describe(config) is None


def test_tensors_that_are_neither_of_text_nor_of_images_are_refused(tmp_path: Path) -> None:
    _save(tmp_path, "gemma3")
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"other_tower.weight": torch.ones(4)}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"tensors that its architecture does not: other_tower\.weight"):
        make_runner(tmp_path)


def test_what_cannot_be_described_of_a_text_model_is_not_described() -> None:
    bidirectional, unknown, dynamic = (VARIANTS[name]() for name in ("gemma3", "llava", "llava"))
    bidirectional.text_config.use_bidirectional_attention = True
    unknown.text_config = FalconConfig()
    dynamic.text_config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    assert [describe(config) for config in (bidirectional, unknown, dynamic)] == [None] * 3


def test_sizes_of_a_text_model_that_do_not_fit_each_other_are_refused() -> None:
    config = VARIANTS["mistral3"]()
    config.text_config.num_hidden_layers = 0
    with pytest.raises(UnsupportedModel, match="the sizes of this mistral model do not fit each other: layers"):
        describe(config)


PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, bool]]] = {
    "gemma-3-4b-it": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False},
        },
        (262208, 131072, 34, True),
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_act": "silu",
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 128000,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
            "use_sliding_window": False, "vision_config": {"depth": 32, "hidden_size": 1280}, "vocab_size": 152064,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        (152064, 128000, 28, False),
    ),
    "Qwen3-VL-4B-Instruct": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
            "text_config": {
                "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
                "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "rope_theta": 5000000, "tie_word_embeddings": True, "vocab_size": 151936,
            },
            "tie_word_embeddings": True, "vision_config": {"depth": 24, "model_type": "qwen3_vl"},
        },
        (151936, 262144, 36, True),
    ),
    "Mistral-Small-3.1-24B-Instruct-2503": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
            "text_config": {
                "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768,
                "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
                "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
                "sliding_window": None, "vocab_size": 131072,
            },
            "vision_config": {"head_dim": 64, "hidden_size": 1024, "model_type": "pixtral", "rope_theta": 10000.0},
        },
        (131072, 131072, 40, True),
    ),
    "llava-1.5-7b-hf": (
        {
            "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
            "text_config": {
                "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
                "rms_norm_eps": 1e-05, "vocab_size": 32064,
            },
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 768, "vocab_size": 32000},
            "vocab_size": 32064,
        },
        (32064, 4096, 32, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published(name: str, tmp_path: Path) -> None:
    """Fields that they leave out are those of transformers."""
    config, (vocab_size, context_length, num_layers, is_tied) = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = _describe(tmp_path)
    assert (described.vocab_size, described.context_length) == (vocab_size, context_length)
    assert (len(described.layers), described.tied_embeddings) == (num_layers, is_tied)
    theta = max(layer.attention.rope.theta for layer in described.layers if layer.attention.rope is not None)
    text = config.get("text_config", config)
    default = 1_000_000.0 if "gemma" in name else 10_000.0
    assert theta == text.get("rope_theta", default)


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_weights_in_fp8_as_mistral_publishes_them(kernels: str, tmp_path: Path) -> None:
    """Of the text model alone, with one scale for a weight and one of activations, which is not read."""
    dense = tmp_path / "dense"
    _save(dense, "mistral3-ministral")

    def fp8(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if not layer.startswith("language_model.model."):
            return None
        made = quantize_fp8(weight, None)
        scales = {"weight_scale_inv": made.scales.view(()), "activation_scale": torch.ones(())}
        return {f"{layer}.weight": made.codes} | {
            f"{layer}.{name}": scale for name, scale in scales.items()
        }, made.dense()

    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    packed = save_quantized(dense, tmp_path / "packed", fp8, quantization_config=settings)
    assert _logprobs(packed, kernels) == pytest.approx(_logprobs(dense, kernels), abs=1e-4)


@pytest.mark.parametrize("variant", ["gemma3", "gemma4-unified", "qwen2.5-vl", "qwen3-vl"])
def test_a_text_model_is_quantized_and_the_rest_stays(variant: str, tmp_path: Path) -> None:
    source, out = _save(tmp_path / "dense", variant), tmp_path / "out"
    quantize_model(source, out, scheme_named("w8a16", 32), lambda line: None)
    before, after = (load_file(each / "model.safetensors") for each in (source, out))
    of_images = {name for name in before if "vision" in name or "visual" in name}
    assert of_images
    assert all(torch.equal(before[name], after[name]) for name in of_images)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {name.removesuffix(".weight") for name in of_images if name.endswith(".weight")} <= set(ignored)
    assert any(name.endswith("q_proj.weight_packed") for name in after.keys() - of_images)
    coded, plain = torch.tensor(_logprobs(out, "torch")), torch.tensor(_logprobs(source, "torch"))
    assert (coded - plain).norm() < 0.2 * (plain - plain.mean()).norm()


def _logprobs(directory: Path, kernels: str) -> list[float]:
    """Of every token after one prompt."""
    driver = Driver(make_runner(directory, kernels))
    driver.generate(prompts(40), 1, EVERY_LOGPROB)
    return [value for _, value in sorted(driver.logprobs[1][0].top)]
