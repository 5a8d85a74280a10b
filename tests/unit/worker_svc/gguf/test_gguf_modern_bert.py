"""GGUF files of encoders with the layers of decoders, against transformers' models that they are made of."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGUFWriter
from tokenizers import Tokenizer
from torch import Tensor

import compiled
from bert_models import save_classifier
from described_models import description_of
from encoder_gguf import round_to
from llama_models import prompts
from model_gguf import Fields, GgufCase, Named, write_model_gguf
from quire_kernels.cpu.amx import has_amx
from svc_common.preparation import PreparationFailed
from tiny_gguf import TOKENS, replaced
from worker_svc.encoder.pooling import embed
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.model.compiled_states import load_compiled_states
from worker_svc.model.decoder_states import load_decoder_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.score_head import load_score_head
from worker_svc.step import EmbeddingParams

Change = Callable[[GGUFWriter], None]

CPU = torch.device("cpu")
PROMPTS = prompts(1, 9, 37)
WINDOW = 8
_SIZES = {"vocab_size": len(TOKENS), "intermediate_size": 96, "initializer_range": 0.15}
_NAMES = {
    "model.embeddings.tok_embeddings": "token_embd",
    "model.embeddings.norm": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "model.final_norm": "output_norm",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
}


def _fields(config: Any) -> Fields:
    return {
        "attention.causal": False,
        "attention.sliding_window": config.local_attention,
        "attention.sliding_window_pattern": 3,
        "classifier.pooling_type": {"mean": 1, "cls": 2}[config.classifier_pooling],
        "hidden_activation": config.hidden_activation,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.scaling.type": "none",
        "vocab_size": config.vocab_size,
    }


def _without_head(_config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    if not name.startswith(("head.", "dense.", "classifier.")):
        yield name, tensor


def _case(architecture: str, *, has_head: bool) -> GgufCase:
    """How a model of `bert_models` is written."""
    fields = _fields if architecture == "modernbert" else _fields_of_eurobert
    name = {"modernbert": "modern-bert"}.get(architecture, architecture)
    return GgufCase(name, dict, fields, names=_NAMES, tensors=None if has_head else _without_head)


def _fields_of_eurobert(_config: Any) -> Fields:
    return {"attention.causal": False, "classifier.pooling_type": 1, "rope.scaling.type": "none"}


def _saved(root: Path, architecture: str, **config: Any) -> Any:
    theirs = root / "theirs"
    theirs.mkdir()
    return save_classifier(theirs, architecture, **{**_SIZES, **config})


def _convert(
    root: Path, model: Any, *changes: Change, pooling: int | None = 1, has_head: bool = False, **written: Any
) -> Path:
    ours = root / "ours"
    ours.mkdir()
    case = _case(model.config.model_type, has_head=has_head)

    def change(writer: GGUFWriter) -> None:
        for name in ("bos", "eos"):
            getattr(writer, f"add_add_{name}_token")(True)
        if pooling is not None:
            replaced(f"{case.architecture}.pooling_type", pooling)(writer)
        for each in changes:
            each(writer)

    path = write_model_gguf(root / "tiny.gguf", case, model, change=change, **written)
    GgufConversion(path, ours, print).run(keeps_blocks=True)
    return ours


def _states(directory: Path, kernels: str) -> Any:
    description = description_of(directory, ModelDescription)
    assert description.is_encoder
    if kernels == "torch":
        return load_decoder_states(description, directory, torch.float32, CPU)
    return load_compiled_states(description, directory, torch.float32, compiled.thread_pool(2))


@torch.inference_mode()
def _expected_states(model: Any) -> list[Tensor]:
    return [model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def _assert_embeddings(ours: Path, model: Any, pooling: int = 1) -> None:
    pooled = [states.mean(0) if pooling == 1 else states[{2: 0, 3: -1}[pooling]] for states in _expected_states(model)]
    expected = F.normalize(torch.stack(pooled), dim=1)
    defaults = embedding_defaults(ours)
    for kernels in ("torch", "compiled"):
        with torch.inference_mode():
            vectors = embed(_states(ours, kernels)(PROMPTS), [EmbeddingParams()] * len(PROMPTS), defaults)
        tolerance = 1e-3 if kernels == "compiled" and has_amx(compiled.thread_pool()) else 1e-5
        torch.testing.assert_close(torch.tensor(vectors), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("pooling", [1, 2, 3])
@pytest.mark.parametrize("architecture", ["modernbert", "eurobert"])
def test_embeddings_are_those_of_transformers(architecture: str, pooling: int, tmp_path: Path) -> None:
    model = _saved(tmp_path, architecture)
    _assert_embeddings(_convert(tmp_path, model, pooling=pooling), model, pooling)


@pytest.mark.parametrize("architecture", ["modernbert", "eurobert"])
def test_products_stay_in_blocks(architecture: str, tmp_path: Path) -> None:
    model = _saved(tmp_path, architecture)
    ours = _convert(tmp_path, model, stored=lambda _: "Q8_0")
    round_to(model, "Q8_0")
    _assert_embeddings(ours, model)
    assert set(json.loads((ours / "config.json").read_text())["quantization_config"]["types"].values()) == {"Q8_0"}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"hidden_activation": "silu"}, {}),
        ({}, {"hidden_activation": None, "attention.sliding_window_pattern": None}),
        ({"global_attn_every_n_layers": 2}, {"attention.sliding_window_pattern": 2}),
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
            {"attention.sliding_window_pattern": [True, False, False, True]},
        ),
        ({"layer_types": ["full_attention"] * 4}, {"attention.sliding_window": None}),
        ({"layer_types": ["full_attention"] * 4}, {"attention.sliding_window": 0}),
        ({"hidden_activation": "silu"}, {"hidden_activation": "swiglu"}),
        ({}, {"classifier.output_labels": ["LABEL_0"]}),
        ({"global_rope_theta": 500.0, "local_rope_theta": 500.0}, {"rope.freq_base_swa": None}),
        ({"global_rope_theta": 500.0, "local_rope_theta": 50.0}, {}),
    ],
    ids=str,
)
def test_windows_positions_and_activations_are_those_of_the_file(
    config: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = _saved(tmp_path, "modernbert", **{"local_attention": WINDOW, **config})
    made = [replaced(f"modern-bert.{name}", value) for name, value in changes.items()]
    _assert_embeddings(_convert(tmp_path, model, *made), model)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"classifier_pooling": "mean"}, {}),
        ({"classifier_pooling": "mean"}, {"classifier.pooling_type": None, "pooling_type": 4}),
        ({"classifier_pooling": "cls"}, {}),
        ({"classifier_bias": True, "num_labels": 3}, {"classifier.output_labels": ["bad", "fair", "good"]}),
    ],
)
def test_rerankers_have_their_head(config: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    model = _saved(tmp_path, "modernbert", **config)
    made = [replaced(f"modern-bert.{name}", value) for name, value in changes.items()]
    ours = _convert(tmp_path, model, *made, pooling=None, has_head=True)
    assert not (ours / "modules.json").exists()
    description = description_of(ours, ModelDescription)
    assert description.score_head is not None
    takes_mean = model.config.classifier_pooling == "mean"
    assert description.score_head.of_mean == takes_mean
    head = load_score_head(description, ours, CPU)
    assert head is not None
    with torch.inference_mode():
        pooled = [states.mean(0) if takes_mean else states[0] for states in _expected_states(model)]
        expected = torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in PROMPTS])
        torch.testing.assert_close(head.outputs(torch.stack(pooled)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adds_separators", [False, True])
def test_texts_and_pairs_are_framed_as_by_bert(adds_separators: bool, tmp_path: Path) -> None:
    model = _saved(tmp_path, "modernbert")
    fields = {"pre": "modern-bert", "add_sep_token": adds_separators, "seperator_token_id": 0, "mask_token_id": 3}
    ours = _convert(tmp_path, model, *(replaced(f"tokenizer.ggml.{name}", value) for name, value in fields.items()))
    made = Tokenizer.from_file(str(ours / "tokenizer.json"))
    separator, first, _, mask, *_ = TOKENS
    assert made.encode("hello").tokens == [first, "he", "ll", "o", separator]
    assert made.encode("he", "ll").tokens == [first, "he", separator, "ll", separator]
    config = json.loads((ours / "tokenizer_config.json").read_text())
    assert [config[f"{name}_token"] for name in ("cls", "sep", "mask")] == [first, separator, mask]


def test_texts_of_eurobert_are_framed(tmp_path: Path) -> None:
    made = Tokenizer.from_file(str(_convert(tmp_path, _saved(tmp_path, "eurobert")) / "tokenizer.json"))
    assert made.encode("hello").tokens == [TOKENS[1], "he", "ll", "o", TOKENS[2]]


def test_a_head_of_pre_training_is_left_out(tmp_path: Path) -> None:
    model = _saved(tmp_path, "modernbert")

    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("cls.weight", model.head.dense.weight.detach().numpy())
        writer.add_tensor("cls.norm.weight", model.head.norm.weight.detach().numpy())

    _assert_embeddings(_convert(tmp_path, model, change), model)


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("modernbert", replaced("modern-bert.attention.causal", True), "modern-bert.attention.causal = True"),
        ("modernbert", replaced("modern-bert.pooling_type", 4), "modern-bert.pooling_type = 4"),
        ("modernbert", replaced("modern-bert.classifier.pooling_type", 3), "modern-bert.classifier.pooling_type = 3"),
        ("modernbert", replaced("modern-bert.hidden_activation", "cubic"), "modern-bert.hidden_activation = cubic"),
        (
            "modernbert",
            replaced("modern-bert.attention.sliding_window", [8, 16, 8, 8]),
            "modern-bert.attention.sliding_window = [8, 16, 8, 8]",
        ),
        (
            "modernbert",
            replaced("tokenizer.ggml.pre", "granite-embed-multi-311m"),
            "its tokenizer is not read: tokenizer.ggml.pre = granite-embed-multi-311m",
        ),
        ("modernbert", replaced("tokenizer.ggml.model", "bert"), "its tokenizer is 'bert'"),
        ("modernbert", replaced("tokenizer.ggml.bos_token_id", None), "its tokenizer has no cls_token"),
        (
            "modernbert",
            replaced("modern-bert.attention.sliding_window_pattern", [True, False]),
            "modern-bert.attention.sliding_window_pattern = [True, False]",
        ),
        (
            "modernbert",
            lambda writer: writer.add_tensor("blk.0.attn_qkv.bias", torch.zeros(288).numpy()),
            "tensors that are not read: blk.0.attn_qkv.bias",
        ),
        ("eurobert", replaced("eurobert.attention.causal", None), "it has no metadata eurobert.attention.causal"),
        ("eurobert", replaced("eurobert.pooling_type", 4), "eurobert.pooling_type = 4"),
    ],
)
def test_what_is_not_read_is_refused_by_name(architecture: str, change: Change, message: str, tmp_path: Path) -> None:
    model = _saved(tmp_path, architecture)
    with pytest.raises(PreparationFailed, match=re.escape(message)):
        _convert(tmp_path, model, change)
