"""What a GGUF file's metadata means, against transformers' models with weights and positions of the test's own."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, RopeScalingType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from runner_driver import Driver, make_runner
from svc_common.models import eos_token_ids_of
from svc_common.preparation import PreparationFailed
from tiny_gguf import HEADS, KV_HEADS, TOKENS, TinyGguf, replaced, write_tiny_gguf
from worker_svc.gguf.architecture import find_architecture
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.step import SamplingParams

CONTEXT = 128
PROMPT = [(7 * token + 3) % len(TOKENS) for token in range(60)]
FACTORS = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OTHER_NAMES = {
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}

Convert = Callable[..., Path]


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    def make(model: TinyGguf, *, keeps_blocks: bool = True) -> Path:
        path, target = write_tiny_gguf(tmp_path / "tiny.gguf", replace(model, context=CONTEXT)), tmp_path / "model"
        target.mkdir()
        GgufConversion(path, target, print).run(keeps_blocks=keeps_blocks)
        return target

    return make


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[[TinyGguf], Any]:
    def read(model: TinyGguf) -> Any:
        path = write_tiny_gguf(tmp_path / "tiny.gguf", model)
        metadata, architecture = GgufMetadata(path, GGUFReader(path)), find_architecture(model.architecture)
        assert architecture is not None
        config = architecture.read_config(metadata)
        metadata.check_fields_read()
        return config

    return read


def _weights(path: Path, architecture: str) -> dict[str, Tensor]:
    """The tensors of a file by transformers' names."""
    names = NAMES | OTHER_NAMES.get(architecture, {})
    weights = {}
    for stored in GGUFReader(path).tensors:
        *layer, name, kind = stored.name.split(".")
        if name not in names:
            continue  # of the positions
        tensor = torch.tensor(np.array(stored.data))
        if architecture == "llama" and name in ("attn_q", "attn_k"):
            # Both halves of a rotated pair are neighbours.
            heads = HEADS if name == "attn_q" else KV_HEADS
            tensor = tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if architecture == "gemma3" and "norm" in name:
            tensor -= 1
        prefix = f"layers.{layer[1]}." if layer else ""
        weights[f"model.{prefix}{names[name]}.{kind}"] = tensor
    return weights


def _model(path: Path, architecture: str, model_type: str, **fields: Any) -> Any:
    """transformers' model with a config that the test writes down."""
    common = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **(common | fields))
    make: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(_weights(path, architecture), strict=False)
    assert unexpected == []
    assert {name for name in missing if not name.endswith("o_proj.bias")} <= {"lm_head.weight"}
    for name in missing:
        if name.endswith(".bias"):
            torch.nn.init.zeros_(model.get_parameter(name))
    return model


def _assert_computed_like(model: Any, directory: Path) -> None:
    driver = Driver(make_runner(directory, "compiled", num_blocks=32))
    (tokens,) = driver.generate([PROMPT], 6, SamplingParams(logprobs=len(TOKENS)))
    found = torch.tensor([[logprob for _, logprob in sorted(each.top)] for each in driver.logprobs[1]])
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(found, logits.float().log_softmax(-1), rtol=0, atol=2e-4)


BOTH_WAYS = pytest.mark.parametrize("keeps_blocks", [True, False], ids=["blocks", "dequantized"])


@BOTH_WAYS
def test_factors_of_llama_3_divide_frequencies(convert: Convert, *, keeps_blocks: bool) -> None:
    def factors(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(FACTORS, np.float32))

    directory = convert(TinyGguf(more=factors), keeps_blocks=keeps_blocks)
    model = _model(directory.parent / "tiny.gguf", "llama", "llama")
    model.model.rotary_emb.inv_freq /= torch.tensor(FACTORS)
    _assert_computed_like(model, directory)


def test_positions_of_deepseek_coder_are_stretched(convert: Convert) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    directory = convert(TinyGguf(more=linear))
    model = _model(directory.parent / "tiny.gguf", "llama", "llama")
    model.model.rotary_emb.inv_freq /= 4
    _assert_computed_like(model, directory)


def test_positions_of_gemma_3_are_stretched_where_all_keys_are_seen(convert: Convert) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(1e6)
        writer.add_sliding_window(16)
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    directory = convert(TinyGguf(architecture="gemma3", layers=6, more=linear))
    model = _model(
        *(directory.parent / "tiny.gguf", "gemma3", "gemma3_text"),
        num_hidden_layers=6,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )
    _assert_computed_like(model, directory)


def _yarn(writer: GGUFWriter, attention: float | None = None) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_rope_scaling_yarn_beta_fast(16.0)
    if attention is not None:
        writer.add_rope_scaling_yarn_attn_factor(attention)


# The temperature of a factor of 4 is 1.13863; llama.cpp's converter writes `attention_factor` of a config so.
@pytest.mark.parametrize("attention", [None, 1.0, 1.1386294])
def test_yarn_of_qwen_is_read(attention: float | None, convert: Convert) -> None:
    directory = convert(TinyGguf(architecture="qwen3", more=lambda writer: _yarn(writer, attention)))
    model = _model(
        *(directory.parent / "tiny.gguf", "qwen3", "qwen3"),
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
        },
    )
    _assert_computed_like(model, directory)


def test_phi_3_rotates_a_part_with_short_factors_and_has_windows(convert: Convert) -> None:
    short = [1.0, 1.1, 1.3, 2.0, 3.0, 5.0]

    def phi(writer: GGUFWriter) -> None:
        writer.add_rope_dimension_count(12)
        writer.add_rope_scaling_orig_ctx_len(100)
        writer.add_rope_scaling_attn_factors(1.19)
        writer.add_sliding_window(20)
        writer.add_tensor("rope_factors_short.weight", np.array(short, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.full(6, 4.0, np.float32))

    directory = convert(TinyGguf(architecture="phi3", more=phi))
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    model = _model(directory.parent / "tiny.gguf", "phi3", "phi3", rope_parameters=rope, sliding_window=20)
    model.model.rotary_emb.inv_freq /= torch.tensor(short)
    model.model.rotary_emb.attention_scaling = 1.19
    _assert_computed_like(model, directory)
    assert make_runner(directory).limits.context_length == 100


@BOTH_WAYS
def test_biases_of_llama_are_read(convert: Convert, *, keeps_blocks: bool) -> None:
    """Those of the product after attention, which transformers has beside them, are zeros."""

    def biases(writer: GGUFWriter) -> None:
        random = np.random.default_rng(3)
        for layer in range(2):
            for name, size in (("q", 64), ("k", 32), ("v", 32)):
                bias = random.standard_normal(size).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.attn_{name}.bias", bias)

    directory = convert(TinyGguf(more=biases), keeps_blocks=keeps_blocks)
    model = _model(directory.parent / "tiny.gguf", "llama", "llama", attention_bias=True)
    _assert_computed_like(model, directory)


def test_a_model_that_is_named_mistral_has_the_windows_of_its_file(convert: Convert) -> None:
    directory = convert(TinyGguf(more=lambda writer: writer.add_name("mistral")))
    config = json.loads((directory / "config.json").read_text())
    assert (config["model_type"], config.get("sliding_window")) == ("llama", None)
    _assert_computed_like(_model(directory.parent / "tiny.gguf", "llama", "llama"), directory)


@pytest.mark.parametrize(
    ("architecture", "layers", "expected"),
    [("gemma2", 2, 24), ("gemma2", 46, 16), ("gemma3", 2, 24), ("gemma3", 62, 16)],
)
def test_queries_of_gemma_of_27b_are_scaled_by_the_width_of_a_head(
    architecture: str, layers: int, expected: int, config_of: Callable[[TinyGguf], Any]
) -> None:
    def lengths(writer: GGUFWriter) -> None:
        for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
            add(24)

    assert config_of(TinyGguf(architecture, layers=layers, more=lengths)).query_pre_attn_scalar == expected


def test_base_and_windows_of_starcoder_2_are_read(config_of: Callable[[TinyGguf], Any]) -> None:
    def fields(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(999999.5)
        writer.add_sliding_window(64)

    config = config_of(TinyGguf("starcoder2", more=fields))
    assert config.rope_parameters["rope_theta"] == 999999.5
    assert (config.sliding_window, config.norm_epsilon) == (64, pytest.approx(1e-5))


def _with_tokens(*first: str) -> Callable[[GGUFWriter], None]:
    tokens = [*first, *TOKENS[len(first) :]]

    def change(writer: GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))  # ordinary ones, as in some files
        writer.add_eos_token_id(1)

    return change


# Of which `<|end|>` ends a message, and a turn goes on
HARMONY = ("<|end|>", "<|return|>", "<|call|>")


def _with_eot(writer: GGUFWriter) -> None:
    writer.add_eot_token_id(0)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 1)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (_with_eot, [2, 0, 1]),
        (_with_tokens("<pad>", "<eos>", "<end_of_turn>"), [1, 2]),
        (lambda _: None, [2, 0]),
        (_with_tokens(*HARMONY), [1, 2]),
        (_with_tokens("[EOT]", "[EOS]", "[BOS]"), [1, 0]),
    ],
    ids=["named by the file", "gemma's text", "qwen's text", "gpt-oss's text", "kimi's text"],
)
@BOTH_WAYS
def test_tokens_that_end_a_turn_end_an_answer(
    more: Callable[[GGUFWriter], None], expected: list[int], convert: Convert, *, keeps_blocks: bool
) -> None:
    assert eos_token_ids_of(convert(TinyGguf(more=more), keeps_blocks=keeps_blocks)) == expected


@BOTH_WAYS
@pytest.mark.parametrize(
    ("add", "named"),
    [
        (lambda writer: writer.add_logit_scale(0.5), "metadata that is not read: llama.logit_scale = 0.5"),
        (lambda writer: writer.add_expert_group_count(8), "metadata that is not read: llama.expert_group_count = 8"),
        (lambda writer: writer.add_sliding_window(32), "not read: llama.attention.sliding_window = 32"),
        (lambda writer: writer.add_rope_dimension_count(8), "not read: llama.rope.dimension_count = 8"),
        (lambda writer: writer.add_head_count_kv([2, 4]), r"not read: llama.attention.head_count_kv = [2, 4]"),
        (lambda writer: _yarn(writer, 1.5), "not read: llama.rope.scaling.yarn_attn_factor = 1.5"),
        (lambda writer: _yarn(writer, -1.0), "not read: llama.rope.scaling.yarn_attn_factor = -1.0"),
        (
            lambda writer: writer.add_rope_scaling_attn_factors(float("nan")),
            "not read: llama.rope.scaling.attn_factor = nan",
        ),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "dynamic"), "scaled by 'dynamic'; what is read"),
        (
            lambda writer: writer.add_tensor("blk.1.attn_q_norm.weight", np.ones(16, np.float32)),
            "tensors that are not read: blk.1.attn_q_norm.weight",
        ),
        (lambda writer: writer.add_uint16("split.count", 3), "one of 3 files of a model"),
        (lambda writer: writer.add_head_count(0), "its metadata llama.attention.head_count is 0"),
        (
            replaced("llama.attention.head_count", "x"),
            "llama.attention.head_count must be a whole number, or a list with",
        ),
        (replaced("llama.block_count", 2.5), "its metadata llama.block_count must be a whole number, not 2.5"),
        (
            lambda writer: writer.add_int32("llama.rope.dimension_count", -8),
            "rope.dimension_count must be a whole number, no",
        ),
        (replaced("llama.rope.freq_base", "32"), "its metadata llama.rope.freq_base must be a number, not 32"),
        (replaced("general.architecture", 5), "its metadata general.architecture must be a text, not 5"),
        (replaced("general.architecture", None), "it has no metadata general.architecture"),
        (replaced("tokenizer.ggml.tokens", None), "it has no metadata tokenizer.ggml.tokens"),
        (replaced("tokenizer.ggml.tokens", 5), "its metadata tokenizer.ggml.tokens must be a list of texts, not 5"),
        (replaced("tokenizer.ggml.merges", None), "it has no metadata tokenizer.ggml.merges"),
        (
            replaced("tokenizer.ggml.eos_token_id", len(TOKENS)),
            f"its metadata tokenizer.ggml.eos_token_id is {len(TOKENS)}, and it has {len(TOKENS)} tokens",
        ),
        (replaced("tokenizer.ggml.bos_token_id", [1]), "tokenizer.ggml.bos_token_id must be a whole number, not [1]"),
        (replaced("llama.block_count", 2**31), "its metadata llama.block_count is 2147483648, and it has 20 tensors"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    add: Callable[[GGUFWriter], None], named: str, convert: Convert, *, keeps_blocks: bool
) -> None:
    with pytest.raises(PreparationFailed, match=rf"cannot convert .*tiny\.gguf: .*{re.escape(named)}"):
        convert(TinyGguf(more=add), keeps_blocks=keeps_blocks)


def test_a_shard_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny-00001-of-00002.gguf")
    with pytest.raises(PreparationFailed, match=r"tiny-00001-of-00002\.gguf: it is one of 2 files"):
        GgufMetadata(path, GGUFReader(path))


def test_a_file_that_was_merged_is_no_shard_whatever_its_name_is(tmp_path: Path) -> None:
    merged = TinyGguf(more=lambda writer: writer.add_uint16("split.count", 0))
    path = write_tiny_gguf(tmp_path / "tiny-00001-of-00002.gguf", merged)
    GgufMetadata(path, GGUFReader(path))


@pytest.mark.parametrize("has_windows", [False, True])
def test_a_pattern_of_windows_may_be_the_same_for_all_layers(
    has_windows: bool, config_of: Callable[[TinyGguf], Any]
) -> None:
    def pattern(writer: GGUFWriter) -> None:
        writer.add_sliding_window(32)
        writer.add_array("gemma3.attention.sliding_window_pattern", [has_windows] * 2)

    kinds = config_of(TinyGguf("gemma3", more=pattern)).layer_types
    assert kinds == ["sliding_attention" if has_windows else "full_attention"] * 2


def test_a_file_that_had_an_encoder_of_images_is_read_without_its_tensors(config_of: Callable[[TinyGguf], Any]) -> None:
    def left_over(writer: GGUFWriter) -> None:
        writer.add_uint32("gemma3.mm.tokens_per_image", 256)
        writer.add_uint32("gemma3.vision.block_count", 27)

    assert config_of(TinyGguf("gemma3", more=left_over)).num_hidden_layers == 2


def test_fields_that_change_nothing_are_not_refused(config_of: Callable[[TinyGguf], Any]) -> None:
    def harmless(writer: GGUFWriter) -> None:
        writer.add_tensor_data_layout("Meta AI original pth")
        writer.add_expert_count(0)
        writer.add_causal_attention(value=True)
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(4.0)
        writer.add_bool("llama.rope.scaling.finetuned", val=False)
        writer.add_pooling_type(gguf.PoolingType.LAST)
        writer.add_expert_shared_feed_forward_length(0)
        writer.add_expert_weights_scale(1.0)

    assert config_of(TinyGguf(more=harmless)).rope_parameters["rope_type"] == "default"
