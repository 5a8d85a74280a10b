"""GGUF files of Gemma 4, whose layers differ: against transformers' model that the file is made of."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer

import dense_models
from gemma4_gguf import write_gemma4_gguf
from kept_codes import assert_codes_are_multiplied_as_numbers
from llama_models import generate, prompts, save_model
from runner_driver import Driver, make_runner
from svc_common.models import eos_token_ids_of
from svc_common.preparation import PreparationFailed
from tiny_gguf import TOKENS, replaced
from worker_svc.gguf.conversion import GgufConversion

VARIANTS = ("gemma4", "gemma4-small", "gemma4-experts")
PROMPTS = prompts(1, 9, 33)
# Sizes of whole blocks
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def _config(variant: str) -> Any:
    config = dense_models.VARIANTS[variant]()
    given = (
        copy.deepcopy(config.to_dict())
        | _SIZES
        | {"vocab_size": len(TOKENS), "vocab_size_per_layer_input": len(TOKENS)}
    )
    del given["rope_parameters"]["full_attention"]["factor"]  # a file has none
    if given["hidden_size_per_layer_input"]:
        given["hidden_size_per_layer_input"] = 32
    if given["enable_moe_block"]:
        given["moe_intermediate_size"] = 32
    return type(config)(**given)


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Directories of transformers' model, and of what is made of its GGUF file."""

    def make(
        variant: str,
        stored: Callable[[str], str] = lambda _: "F32",
        change: Callable[[GGUFWriter], None] = lambda _: None,
    ) -> tuple[Path, Path]:
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        for directory in (ours, theirs):
            directory.mkdir()
        save_model(theirs, _config(variant))
        model = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
        path = write_gemma4_gguf(tmp_path / "tiny.gguf", model, stored, change)
        GgufConversion(path, ours, print).run(keeps_blocks=True)
        return theirs, ours

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_transformers(variant: str, converted: Callable[..., tuple[Path, Path]]) -> None:
    theirs, ours = converted(variant)
    expected = generate(theirs, PROMPTS, 8)
    for kernels in ("torch", "compiled"):
        assert Driver(make_runner(ours, kernels, num_blocks=64)).generate(PROMPTS, 8) == expected
    assert eos_token_ids_of(ours) == [2, 0]


def test_keys_and_values_of_layers_that_share_them_are_not_used(converted: Callable[..., tuple[Path, Path]]) -> None:
    """Google's files have some."""

    def change(writer: GGUFWriter) -> None:
        for name, shape in (("attn_k", (64, 64)), ("attn_v", (64, 64)), ("attn_k_norm", (32,))):
            writer.add_tensor(f"blk.3.{name}.weight", np.ones(shape, np.float32))

    theirs, ours = converted("gemma4-small", change=change)
    expected = generate(theirs, PROMPTS, 8)
    assert Driver(make_runner(ours, "torch", num_blocks=64)).generate(PROMPTS, 8) == expected


@pytest.mark.parametrize(
    "name", ["rope.freq_base", "rope.freq_base_swa", "embedding_length", "attention.sliding_window"]
)
def test_a_field_that_is_missing_is_named(name: str, converted: Callable[..., tuple[Path, Path]]) -> None:
    def change(writer: GGUFWriter) -> None:
        (fields,) = writer.kv_data
        del fields[f"gemma4.{name}"]

    with pytest.raises(PreparationFailed, match=rf"it has no metadata gemma4\.{name}"):
        converted("gemma4", change=change)


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_keep_their_codes(variant: str, converted: Callable[..., tuple[Path, Path]]) -> None:
    """Layers are multiplied with the codes that torch's operators see as numbers."""
    _, ours = converted(variant, lambda name: "F32" if "gate_inp" in name else "Q8_0")
    types = json.loads((ours / "config.json").read_text())["quantization_config"]["types"]
    tables = {"model.embed_tokens", *(["model.embed_tokens_per_layer"] if variant == "gemma4-small" else [])}
    assert tables <= types.keys()
    assert set(types.values()) == {"Q8_0"}
    assert_codes_are_multiplied_as_numbers(ours, PROMPTS[-1], atol=5e-4)


@pytest.mark.parametrize(
    ("variant", "field", "value"),
    [
        ("gemma4-small", "attention.head_count_kv", [2, 2, 1, 2, 2]),
        ("gemma4-small", "attention.head_count_kv", [2, 1, 1, 2, 1]),
        ("gemma4-small", "feed_forward_length", [96, 96, 96, 192, 96]),
        ("gemma4-small", "feed_forward_length", [96, 96, 96, 288, 288]),
        ("gemma4", "attention.sliding_window_pattern", [True, True]),
        ("gemma4", "attention.value_length_swa", 16),
        ("gemma4", "rope.dimension_count", 32),
        ("gemma4", "attention.scale", 0.5),
    ],
)
def test_what_a_config_cannot_hold_is_refused_by_name(
    variant: str, field: str, value: Any, converted: Callable[..., tuple[Path, Path]]
) -> None:
    with pytest.raises(PreparationFailed, match=rf"metadata that is not read: .*gemma4\.{field} = "):
        converted(variant, change=replaced(f"gemma4.{field}", value))


def test_more_layers_than_tensors_are_refused_at_once(converted: Callable[..., tuple[Path, Path]]) -> None:
    with pytest.raises(PreparationFailed, match=r"its metadata gemma4\.block_count is 2147483648, and it has"):
        converted("gemma4", change=replaced("gemma4.block_count", 2**31))


def test_factors_that_are_not_of_turned_pairs_are_refused(converted: Callable[..., tuple[Path, Path]]) -> None:
    def change(writer: GGUFWriter) -> None:
        (tensors,) = writer.tensors
        factors = tensors["rope_freqs.weight"].tensor
        assert factors is not None
        factors[0] = 2.0

    with pytest.raises(PreparationFailed, match=r"rope_freqs\.weight has other numbers"):
        converted("gemma4", change=change)


def test_texts_are_split_by_merges_of_words_with_their_spaces(converted: Callable[..., tuple[Path, Path]]) -> None:
    letters = ["▁", *"helo", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    kinds = [TokenType.CONTROL] * 5 + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(letters)

    def change(writer: GGUFWriter) -> None:
        (fields,) = writer.kv_data
        for name in [name for name in fields if name.startswith("tokenizer.")]:
            del fields[name]
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(["h e", "l l", "he ll", "hell o", "▁ hello"])
        for name, token in (("bos", 2), ("eos", 1), ("unknown", 3), ("padding", 0)):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}<turn|>")

    _, ours = converted("gemma4", change=change)
    tokenizer = AutoTokenizer.from_pretrained(ours)
    encoded = tokenizer("hello hello<turn|>é", add_special_tokens=False).input_ids
    assert [tokens[token] for token in encoded] == ["hello", "▁hello", "<turn|>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded) == "hello hello<turn|>é"
    assert tokenizer("hello").input_ids == [tokens.index("hello")]
    assert eos_token_ids_of(ours) == [1, 4]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "<bos>hello<turn|>"
