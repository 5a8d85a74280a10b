"""GGUF files of EmbeddingGemma, against transformers' models that they are made of."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGMLQuantizationType, GGUFWriter, PoolingType, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig

import compiled
from described_models import description_of
from llama_models import prompts, save_model
from model_gguf import GgufCase, write_model_gguf
from quire_kernels.cpu.amx import has_amx
from svc_common.preparation import PreparationFailed
from tiny_gguf import TOKENS, replaced
from worker_svc.encoder.pooling import EmbeddingDefaults, embed
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.model.compiled_states import load_compiled_states
from worker_svc.model.decoder_states import load_decoder_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.embedding_layers import load_layers
from worker_svc.step import EmbeddingParams, Pooling

HIDDEN, WIDE, WINDOW = 64, 96, 8
PROMPTS = prompts(1, 9, 37)
_NORMS = {"pre_feedforward_layernorm": "ffn_norm", "post_attention_layernorm": "post_attention_norm"}
CPU = torch.device("cpu")

Change = Callable[[GGUFWriter], None]


def _config() -> Any:
    """Five layers with a window and one without."""
    return Gemma3TextConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        max_position_embeddings=128,
        initializer_range=0.3,
        use_bidirectional_attention=True,
    )


def _above_one(_config: Any, name: str, tensor: Tensor) -> Any:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


CASE = GgufCase(
    "gemma-embedding",
    _config,
    lambda _: {"attention.sliding_window": WINDOW, "pooling_type": 1},
    names=_NORMS,
    tensors=_above_one,
)


def saved(root: Path) -> Any:
    theirs = root / "theirs"
    theirs.mkdir()
    save_model(theirs, _config())
    return AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)


def convert(
    root: Path, model: Any, change: Change = lambda _: None, *, keeps_blocks: bool = True, **written: Any
) -> Path:
    ours = root / "ours"
    ours.mkdir()

    def more(writer: GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        change(writer)

    path = write_model_gguf(root / "tiny.gguf", CASE, model, change=more, **written)
    GgufConversion(path, ours, print).run(keeps_blocks=keeps_blocks)
    return ours


def embeddings(directory: Path, kernels: str) -> Tensor:
    description, defaults = description_of(directory, ModelDescription), embedding_defaults(directory)
    assert description.is_bidirectional
    layers = load_layers(defaults.layers, HIDDEN, directory, CPU)
    states: Any
    if kernels == "torch":
        states = load_decoder_states(description, directory, torch.float32, CPU)
    else:
        states = load_compiled_states(description, directory, torch.float32, compiled.thread_pool(2))
    with torch.inference_mode():
        return torch.tensor(embed(states(PROMPTS), [EmbeddingParams()] * len(PROMPTS), defaults, layers))


def assert_embeddings(ours: Path, model: Any, *dense: Tensor) -> None:
    with torch.inference_mode():
        states = [model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
        expected = torch.stack([each.mean(0) for each in states])
        for weight in dense:
            expected = F.linear(expected, weight)
        expected = F.normalize(expected, dim=1)
    torch.testing.assert_close(embeddings(ours, "torch"), expected, rtol=0, atol=1e-5)
    tolerance = 1e-3 if has_amx(compiled.thread_pool()) else 1e-5
    torch.testing.assert_close(embeddings(ours, "compiled"), expected, rtol=0, atol=tolerance)


def _dense(kind: str = "F32") -> tuple[Change, Tensor, Tensor]:
    """What writes the layers behind the pooling in a type, and their weights."""
    random = np.random.default_rng(0)
    weights = [random.standard_normal(shape).astype(np.float32) for shape in ((WIDE, HIDDEN), (HIDDEN, WIDE))]

    def change(writer: GGUFWriter) -> None:
        for name, weight in zip(("dense_2", "dense_3"), weights, strict=True):
            outputs, inputs = weight.shape
            writer.add_dense_features_dims(name, inputs, outputs)
            of = GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", quantize(weight, of), raw_dtype=of)

    first, second = map(torch.from_numpy, weights)
    return change, first, second


def test_embeddings_are_those_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path)
    ours = convert(tmp_path, model)
    assert "the GGUF file has no layers behind its pooling" in capsys.readouterr().out
    assert embedding_defaults(ours) == EmbeddingDefaults(Pooling.MEAN, normalizes=True)
    assert json.loads((ours / "config.json").read_text())["sliding_window"] == WINDOW
    assert not (ours / "generation_config.json").exists()
    assert_embeddings(ours, model)


def test_layers_behind_the_pooling_are_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, (change, *weights) = saved(tmp_path), _dense()
    ours = convert(tmp_path, model, change)
    assert "behind its pooling" not in capsys.readouterr().out
    assert [layer.folder for layer in embedding_defaults(ours).layers] == ["2_Dense", "3_Dense"]
    assert_embeddings(ours, model, *weights)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_layers_behind_the_pooling_become_float32(kind: str, tmp_path: Path) -> None:
    change, weight, _ = _dense(kind)
    ours = convert(tmp_path, saved(tmp_path), change)
    (stored,) = load_file(ours / "2_Dense" / "model.safetensors").values()
    assert stored.dtype == torch.float32
    torch.testing.assert_close(stored, weight, rtol=0, atol=0.02)


def test_layers_keep_their_blocks(tmp_path: Path) -> None:
    ours = convert(tmp_path, saved(tmp_path), stored=lambda _: "Q8_0")
    types = json.loads((ours / "config.json").read_text())["quantization_config"]["types"]
    assert set(types.values()) == {"Q8_0"}
    assert any("embed_tokens" in layer for layer in types)
    tolerance = 1e-3 if has_amx(compiled.thread_pool()) else 1e-5
    found = embeddings(ours, "torch")
    torch.testing.assert_close(embeddings(ours, "compiled"), found, rtol=0, atol=tolerance)


def test_texts_have_tokens_at_both_ends(tmp_path: Path) -> None:
    ours = convert(tmp_path, saved(tmp_path))
    tokens = Tokenizer.from_file(str(ours / "tokenizer.json")).encode("he").tokens
    assert tokens == [TOKENS[1], "he", TOKENS[2]]


def _gemmas_vocabulary(writer: GGUFWriter) -> None:
    """A vocabulary of sentencepiece, whose merges are in the order of its tokens and not of their scores."""
    (fields,) = writer.kv_data
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "b", "c", "ab", "bc", "▁", "  "]
    types = [3, 3, 3, 2] + [1] * (len(TOKENS) - 4)
    for name in ("merges", "tokens", "token_type", "model", "pre"):
        del fields[f"tokenizer.ggml.{name}"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + [f"<unused{number}>" for number in range(len(TOKENS) - len(tokens))])
    writer.add_token_types(types)
    writer.add_token_scores([-9.0 if text == "ab" else 0.0 for text in tokens] + [0.0] * (len(TOKENS) - len(tokens)))
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)


def test_merges_are_in_the_order_of_gemmas_vocabulary(tmp_path: Path) -> None:
    ours = convert(tmp_path, saved(tmp_path), _gemmas_vocabulary)
    tokenizer = Tokenizer.from_file(str(ours / "tokenizer.json"))
    assert tokenizer.encode("abc  a b").tokens == ["<bos>", "ab", "c", "▁▁", "a", "▁", "b", "<eos>"]


def _of_another_size(writer: GGUFWriter) -> None:
    writer.add_pooling_type(PoolingType.MEAN)
    writer.add_dense_features_dims("dense_2", HIDDEN, WIDE)
    writer.add_tensor("dense_2.weight", np.zeros((WIDE, WIDE), np.float32))


def _bias(writer: GGUFWriter) -> None:
    writer.add_tensor("dense_2.bias", np.zeros(WIDE, np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("gemma-embedding.pooling_type", 4), "metadata that is not read: gemma-embedding.pooling_type = 4"),
        (
            replaced("gemma-embedding.attention.causal", True),
            "metadata that is not read: gemma-embedding.attention.causal = True",
        ),
        (_of_another_size, f"its tensor dense_2.weight is [{WIDE}, {WIDE}], not [{WIDE}, {HIDDEN}]"),
        (_bias, "tensors that are not read: dense_2.bias"),
    ],
)
def test_what_is_not_read_is_refused_by_name(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(PreparationFailed, match=re.escape(message)):
        convert(tmp_path, saved(tmp_path), change)
