"""GGUF files of encoders, against transformers' models that they are made of."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGUFWriter, RopeScalingType
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

import compiled
from bert_models import hidden_states, random_prompts, save_classifier, save_encoder
from described_models import description_of
from encoder_gguf import (
    CONTEXT,
    EncoderCase,
    add_unigram,
    add_wordpiece,
    round_to,
    unigram,
    wordpiece,
    write_encoder_gguf,
)
from encoder_model import CLS
from quire_kernels.cpu.amx import has_amx
from svc_common.preparation import PreparationFailed
from tiny_gguf import replaced
from worker_svc.encoder.pooling import EmbeddingDefaults, embed
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.model.compiled_encoder import load_compiled_encoder
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.score_head import load_score_head
from worker_svc.model.torch_encoder import load_torch_encoder
from worker_svc.step import EmbeddingParams, Pooling

# Sizes of whole blocks
_BLOCKS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
CASES = {
    "bert": EncoderCase("bert", "bert", _BLOCKS),
    "distilbert": EncoderCase("bert", "distilbert", {"dim": 64, "n_heads": 4, "hidden_dim": 96}),
    "xlm-roberta": EncoderCase("bert", "xlm-roberta", _BLOCKS, first_position=2),
    "nomic-bert": EncoderCase("nomic-bert", "nomic_bert", {"intermediate_size": 96}),
}
PROMPTS = random_prompts([1, 2, 17, 40])
TEXTS = (
    *("Hello world", "hello worlds", "Crème CRÈME crème", "straße ss", "abc", "中文abc", "a中", "ΕΛλ ελ"),
    *("xxx q 🙂!", "[unused1] [x]", "a\tb\n ▁x", "[MASK] hello [SEP]", "", "e\u0301 é"),
)

Change = Callable[[GGUFWriter], None]


def convert(
    root: Path,
    case: EncoderCase,
    model: Any,
    theirs: Path,
    *,
    tokenizer: Tokenizer | None = None,
    add: Callable[[GGUFWriter, Tokenizer], None] = add_wordpiece,
    keeps_blocks: bool = True,
    report: Callable[[str], None] = print,
    **written: Any,
) -> Path:
    """The directory that is made of a model's GGUF file."""
    ours = root / "ours"
    ours.mkdir()
    made = Tokenizer.from_file(str(theirs / "tokenizer.json")) if tokenizer is None else tokenizer
    path = write_encoder_gguf(
        root / "tiny.gguf", case, theirs, model.config, lambda writer: add(writer, made), **written
    )
    GgufConversion(path, ours, report).run(keeps_blocks=keeps_blocks)
    return ours


def saved(root: Path, case: EncoderCase, **config: Any) -> tuple[Any, Path]:
    theirs = root / "theirs"
    theirs.mkdir()
    return save_encoder(theirs, case.model, **case.config, **config), theirs


def embeddings(directory: Path, kernels: str, prompts: Sequence[Sequence[int]]) -> Tensor:
    description, cpu = description_of(directory, EncoderDescription), torch.device("cpu")
    encoder: Any
    if kernels == "torch":
        encoder = load_torch_encoder(description, directory, torch.float32, cpu)
    else:
        encoder = load_compiled_encoder(description, directory, torch.float32, compiled.thread_pool(2))
    with torch.inference_mode():
        vectors = embed(encoder(prompts), [EmbeddingParams()] * len(prompts), embedding_defaults(directory))
    return torch.tensor(vectors)


def expected_embeddings(model: Any, pooling: int, prompts: Sequence[Sequence[int]]) -> Tensor:
    pool: dict[int, Callable[[Tensor], Tensor]] = {
        1: lambda states: states.mean(0), 2: lambda states: states[0], 3: lambda states: states[-1],
    }  # fmt: skip
    pooled = torch.stack([pool[pooling](hidden_states(model, prompt)) for prompt in prompts])
    return F.normalize(pooled, dim=1)


def assert_embeddings(ours: Path, model: Any, pooling: int) -> None:
    expected = expected_embeddings(model, pooling, PROMPTS)
    torch.testing.assert_close(embeddings(ours, "torch", PROMPTS), expected, rtol=0, atol=1e-5)
    tolerance = 1e-3 if has_amx(compiled.thread_pool()) else 1e-5
    torch.testing.assert_close(embeddings(ours, "compiled", PROMPTS), expected, rtol=0, atol=tolerance)


def _add_tensor(name: str) -> Change:
    return lambda writer: writer.add_tensor(name, torch.zeros(64).numpy())


def _drop(name: str) -> Change:
    def change(writer: GGUFWriter) -> None:
        (tensors,) = writer.tensors
        del tensors[name]

    return change


def _without(name: str) -> Change:
    def change(writer: GGUFWriter) -> None:
        (fields,) = writer.kv_data
        del fields[f"tokenizer.ggml.{name}"]

    return change


@pytest.mark.parametrize("pooling", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_those_of_transformers(name: str, pooling: int, tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES[name])
    assert_embeddings(convert(tmp_path, CASES[name], model, theirs, pooling=pooling), model, pooling)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("name", CASES)
def test_embeddings_of_other_types_are_those_of_rounded_weights(name: str, kind: str, tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES[name])
    reported: list[str] = []
    ours = convert(tmp_path, CASES[name], model, theirs, stored=kind, report=reported.append)
    round_to(model, kind)
    assert_embeddings(ours, model, 1)
    tensors = load_file(ours / "model.safetensors")
    config = json.loads((ours / "config.json").read_text())
    if kind == "F16":
        assert "quantization_config" not in config
        assert tensors["embeddings.word_embeddings.weight"].dtype == torch.float16
    else:
        assert set(config["quantization_config"]["types"].values()) == {kind}
        assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("blocks")} == {torch.uint8}
        assert tensors["embeddings.word_embeddings.weight"].dtype == torch.float32
    assert not any("dequantized" in line for line in reported)


def test_a_file_may_be_dequantized(tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES["bert"])
    ours = convert(tmp_path, CASES["bert"], model, theirs, stored="Q8_0", keeps_blocks=False)
    assert "quantization_config" not in json.loads((ours / "config.json").read_text())
    round_to(model, "Q8_0")
    assert_embeddings(ours, model, 1)


@pytest.mark.parametrize("pooling", [None, 0])
def test_without_a_pooling_the_mean_is_not_normalised(pooling: int | None, tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES["bert"])
    ours = convert(tmp_path, CASES["bert"], model, theirs, pooling=pooling)
    assert embedding_defaults(ours) == EmbeddingDefaults(Pooling.MEAN, normalizes=False)


def test_a_model_with_pairs_has_types(tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES["bert"])
    ours = convert(tmp_path, CASES["bert"], model, theirs)
    description = description_of(ours, EncoderDescription)
    encoder = load_torch_encoder(description, ours, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        (states,) = encoder([PROMPTS[3]], [7])
    torch.testing.assert_close(states, hidden_states(model, PROMPTS[3], 7), rtol=1e-4, atol=1e-4)
    assert not (ours / "generation_config.json").exists()
    assert description.context_length == CONTEXT
    assert description.layers[0].mlp_norm.eps == pytest.approx(1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"lowercase": False}, {"lowercase": False, "strip_accents": True}, {"strip_accents": False}],
    ids=str,
)
def test_texts_have_the_tokens_of_the_models_own_tokenizer(options: dict[str, Any], tmp_path: Path) -> None:
    own = wordpiece(**options)
    model, theirs = saved(tmp_path, CASES["bert"], vocab_size=own.get_vocab_size())
    ours = convert(tmp_path, CASES["bert"], model, theirs, tokenizer=own)
    made = Tokenizer.from_file(str(ours / "tokenizer.json"))
    assert made.get_vocab() == own.get_vocab()
    for text in TEXTS:
        for pair in (None, "hello world"):
            found, expected = (each.encode(text, pair) for each in (made, own))
            assert (text, found.tokens, found.type_ids) == (text, expected.tokens, expected.type_ids)
        assert made.decode(own.encode(text).ids) == own.decode(own.encode(text).ids)


def _without_capitals(writer: GGUFWriter) -> None:
    """Has a vocabulary of small letters, but for special tokens and one in brackets."""
    (fields,) = writer.kv_data
    tokens = fields["tokenizer.ggml.tokens"]
    tokens.value = [text if "[" in text else text.lower() + "'" * text.count("▁H") for text in tokens.value]


@pytest.mark.parametrize(
    ("options", "change", "is_reported"),
    [
        ({}, lambda _: None, True),
        ({"lowercase": False}, lambda _: None, False),
        ({}, _without_capitals, False),
    ],
    ids=["with capitals", "which texts keep", "without capitals"],
)
def test_capitals_that_texts_lose_are_reported(
    options: dict[str, Any], change: Change, is_reported: bool, tmp_path: Path
) -> None:
    own, reported = wordpiece(**options), list[str]()
    model, theirs = saved(tmp_path, CASES["bert"], vocab_size=own.get_vocab_size())
    convert(tmp_path, CASES["bert"], model, theirs, tokenizer=own, report=reported.append, change=change)
    assert any("words with capitals" in line for line in reported) == is_reported


def test_labels_without_a_head_change_nothing(tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES["bert"])
    ours = convert(
        tmp_path, CASES["bert"], model, theirs, change=replaced("bert.classifier.output_labels", ["LABEL_0"])
    )
    assert_embeddings(ours, model, 1)


_UNIGRAM_TEXTS = (
    *("hello worlds", "  hello \t world  ", "ABab BA", "中文a 文", "hé q é🙂🙂!", "o<mask> a", "a <mask>b", "</s>", ""),
    *("\n a", "helloworld", "aaab ▁ab", "<unk>"),
)


def test_texts_have_the_tokens_of_unigram_vocabularies(tmp_path: Path) -> None:
    own, case = unigram(), CASES["xlm-roberta"]
    model, theirs = saved(tmp_path, case, vocab_size=own.get_vocab_size())
    ours = convert(tmp_path, case, model, theirs, tokenizer=own, add=add_unigram)
    made = Tokenizer.from_file(str(ours / "tokenizer.json"))
    assert made.get_vocab() == own.get_vocab()
    assert made.encode("AB").ids == own.encode("ab").ids
    for text in _UNIGRAM_TEXTS:
        for pair in (None, "hello world"):
            found, expected = (each.encode(text, pair) for each in (made, own))
            assert (text, found.tokens, found.type_ids) == (text, expected.tokens, expected.type_ids)
            assert made.decode(found.ids) == own.decode(found.ids)


@pytest.mark.parametrize(
    ("name", "value", "text", "expected"),
    [
        ("add_bos_token", False, "hello", ["▁hello", "</s>"]),
        ("add_eos_token", False, "hello", ["<s>", "▁hello"]),
        ("add_space_prefix", False, "a", ["<s>", "a", "</s>"]),
        ("remove_extra_whitespaces", False, "a  a", ["<s>", "▁a", "▁", "▁a", "</s>"]),
    ],
)
def test_fields_of_unigram_vocabularies(name: str, value: bool, text: str, expected: list[str], tmp_path: Path) -> None:
    own, case = unigram(), CASES["xlm-roberta"]
    model, theirs = saved(tmp_path, case, vocab_size=own.get_vocab_size())
    change = replaced(f"tokenizer.ggml.{name}", value)
    ours = convert(tmp_path, case, model, theirs, tokenizer=own, add=add_unigram, change=change)
    assert Tokenizer.from_file(str(ours / "tokenizer.json")).encode(text).tokens == expected


def _with_charsmap(data: bytes) -> Change:
    def change(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.precompiled_charsmap"]
        writer.add_precompiled_charsmap(data)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            replaced("tokenizer.ggml.treat_whitespace_as_suffix", True),
            "tokenizer.ggml.treat_whitespace_as_suffix = True",
        ),
        (_without("scores"), "its tokenizer does not have a score for each token"),
        (_with_charsmap(b"\0" * 4), "its tokenizer.ggml.precompiled_charsmap cannot be used: index out of bounds"),
        (_with_charsmap(b"\xff" * 9), "its tokenizer.ggml.precompiled_charsmap cannot be used: "),
        (_without("bos_token_id"), "its tokenizer has no cls_token"),
    ],
)
def test_unigram_vocabularies_that_are_not_read(change: Change, message: str, tmp_path: Path) -> None:
    own, case = unigram(), CASES["xlm-roberta"]
    model, theirs = saved(tmp_path, case, vocab_size=own.get_vocab_size())
    with pytest.raises(PreparationFailed, match=re.escape(message)):
        convert(tmp_path, case, model, theirs, tokenizer=own, add=add_unigram, change=change)


def test_the_unknown_token_is_that_of_its_type(tmp_path: Path) -> None:
    own, case = unigram(), CASES["xlm-roberta"]
    model, theirs = saved(tmp_path, case, vocab_size=own.get_vocab_size())
    change = _without("unknown_token_id")
    ours = convert(tmp_path, case, model, theirs, tokenizer=own, add=add_unigram, change=change)
    made = Tokenizer.from_file(str(ours / "tokenizer.json"))
    assert made.encode("q").ids == own.encode("q").ids


def test_earlier_files_name_fewer_special_tokens(tmp_path: Path) -> None:
    """Those of llama.cpp's default, and `cls` in place of `bos`. Words in brackets have no space."""

    def change(writer: GGUFWriter) -> None:
        (fields,) = writer.kv_data
        for name in ("bos", "eos", "mask"):
            del fields[f"tokenizer.ggml.{name}_token_id"]
        writer.add_uint32("tokenizer.ggml.cls_token_id", CLS)
        fields["tokenizer.ggml.tokens"].value = [
            text.removeprefix("▁") if text.endswith("unused1]") else text
            for text in fields["tokenizer.ggml.tokens"].value
        ]

    own = wordpiece()
    model, theirs = saved(tmp_path, CASES["bert"], vocab_size=own.get_vocab_size())
    ours = convert(tmp_path, CASES["bert"], model, theirs, tokenizer=own, change=change)
    made = Tokenizer.from_file(str(ours / "tokenizer.json"))
    assert made.get_vocab() == own.get_vocab()
    assert made.encode("Hello worlds").tokens == ["[CLS]", "hello", "world", "##s", "[SEP]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("bert.pooling_type", 5), "metadata that is not read: bert.pooling_type = 5"),
        (replaced("bert.pooling_type", 4), "metadata that is not read: bert.pooling_type = 4"),
        (replaced("bert.attention.causal", True), "metadata that is not read: bert.attention.causal = True"),
        (replaced("bert.attention.head_count", 0), "its metadata bert.attention.head_count is 0"),
        (replaced("bert.attention.head_count_kv", 2), "metadata that is not read: bert.attention.head_count_kv = 2"),
        (replaced("bert.attention.key_length", 32), "metadata that is not read: bert.attention.key_length = 32"),
        (replaced("bert.attention.max_alibi_bias", 8), "metadata that is not read: bert.attention.max_alibi_bias = 8"),
        (replaced("bert.rope.freq_base", 8), "metadata that is not read: bert.rope.freq_base = 8"),
        (
            replaced("tokenizer.ggml.model", "gpt2"),
            "its tokenizer is 'gpt2'; those of encoders that are read: bert, t5",
        ),
        (_add_tensor("cls.bias"), "tensors that are not read: cls.bias"),
        (_add_tensor("blk.0.attn_q_norm.weight"), "tensors that are not read: blk.0.attn_q_norm.weight"),
        (_drop("blk.1.ffn_up.weight"), "no tensor blk.1.ffn_up.weight"),
        (_drop("position_embd.weight"), "no tensor position_embd.weight"),
    ],
)
def test_what_is_not_read_is_refused_by_name(change: Change, message: str, tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES["bert"])
    with pytest.raises(PreparationFailed, match=re.escape(message)):
        convert(tmp_path, CASES["bert"], model, theirs, change=change)


@pytest.mark.parametrize(("pooling", "num_labels"), [(4, 1), (None, 1), (4, 3)])
@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
def test_rerankers_have_their_head(pooling: int | None, num_labels: int, stored: str, tmp_path: Path) -> None:
    case, theirs, names = CASES["xlm-roberta"], tmp_path / "theirs", ["bad", "fair", "good"][:num_labels]
    theirs.mkdir()
    model = save_classifier(theirs, case.model, **case.config, num_labels=num_labels)

    def change(writer: GGUFWriter) -> None:
        if num_labels > 1:
            writer.add_classifier_output_labels(names)

    ours = convert(tmp_path, case, model, theirs, pooling=pooling, stored=stored, change=change)
    if stored != "F32":
        round_to(model, stored)
    description = description_of(ours, EncoderDescription)
    assert not (ours / "modules.json").exists()
    if num_labels > 1:
        assert list(json.loads((ours / "config.json").read_text())["id2label"].values()) == names
    encoder = load_torch_encoder(description, ours, torch.float32, torch.device("cpu"))
    head = load_score_head(description, ours, torch.device("cpu"))
    assert head is not None
    with torch.inference_mode():
        found = head.outputs(torch.stack([states[0] for states in encoder(PROMPTS)]))
        expected = torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("bert.pooling_type", 2), "metadata that is not read: bert.pooling_type = 2"),
        (replaced("bert.classifier.output_labels", "good"), "metadata that is not read: bert.classifier.output_labels"),
        (_drop("cls.weight"), "no tensor cls.weight"),
        (_drop("token_types.weight"), "tensors that are not read: cls.bias, cls.output.bias"),
    ],
)
def test_heads_that_are_not_read(change: Change, message: str, tmp_path: Path) -> None:
    case, theirs = CASES["xlm-roberta"], tmp_path / "theirs"
    theirs.mkdir()
    model = save_classifier(theirs, case.model, **case.config, num_labels=3)
    with pytest.raises(PreparationFailed, match=re.escape(message)):
        convert(tmp_path, case, model, theirs, pooling=None, change=change)


def test_a_tokenizer_without_tokens_at_both_ends_is_refused(tmp_path: Path) -> None:
    model, theirs = saved(tmp_path, CASES["bert"])
    with pytest.raises(PreparationFailed, match="its tokenizer has no sep_token"):
        convert(tmp_path, CASES["bert"], model, theirs, change=_without("seperator_token_id"))


def test_biases_of_nomic_bert_are_refused_and_mixtures_too(tmp_path: Path) -> None:
    case = CASES["nomic-bert"]
    model, theirs = saved(tmp_path, case)
    with pytest.raises(PreparationFailed, match=r"tensors that are not read: blk\.0\.attn_qkv\.bias"):
        convert(tmp_path, case, model, theirs, change=_add_tensor("blk.0.attn_qkv.bias"))
    (tmp_path / "ours").rmdir()
    mixture = EncoderCase("nomic-bert-moe", case.model, case.config)
    with pytest.raises(PreparationFailed, match="nomic-bert-moe"):
        convert(tmp_path, mixture, model, theirs)


def test_positions_of_nomic_bert_may_be_scaled(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    model, theirs = saved(tmp_path, CASES["nomic-bert"], rope_parameters=rope)
    assert_embeddings(convert(tmp_path, CASES["nomic-bert"], model, theirs, change=change), model, 1)
