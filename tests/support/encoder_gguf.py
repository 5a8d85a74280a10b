"""Writes tiny encoders of transformers as GGUF files, as llama.cpp's converter does, and tokenizers to write with them.

Source: llama.cpp's `conversion/bert.py`. Nothing of the code that reads files is used here.
"""

import json
import re
import struct
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from encoder_model import SPECIAL_TOKENS, template_processor
from tiny_gguf import write_file

CONTEXT = 64
_MORE_WORDS = (
    *("hello", "world", "##s", "creme", "Crème", "##é", "e", "##e", "a", "##b", "##c", "straße", "##ss", "##▁", "▁"),
    *("中", "文", "!", "[", "]", "##]", "#", "##[", "[unused1]", "Ελ", "ελ", "##λ", "x", "##x", "Hello", "C", "##re"),
)
_PIECES = {
    "<s>": 0.0, "<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁hello": -3.0, "▁": -2.5, "hell": -4.5, "o": -3.5,
    "▁wor": -5.0, "ld": -5.5, "▁world": -9.0, "s": -4.0, "中": -6.0, "文": -6.5, "中文": -7.0, "é": -6.0, "a": -3.0,
    "b": -3.1, "ab": -5.9, "▁a": -3.3, "!": -4.0, "<mask>": 0.0,
}  # fmt: skip
_NAMES = {
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
}
_OF_LAYERS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
_LAYER = re.compile(r"\w+\.layers?\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class EncoderCase:
    """A model, by its name among `bert_models.ENCODERS`, and how it is written."""

    architecture: str
    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    first_position: int = 0
    """The rows of the position embedding before this one are not written."""


def wordpiece(*, lowercase: bool = True, strip_accents: bool | None = None) -> Tokenizer:
    """A tokenizer of words with accents, capitals, Chinese and brackets."""
    words = dict.fromkeys((*SPECIAL_TOKENS, *_MORE_WORDS))
    made = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = template_processor()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return made


def add_wordpiece(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """Writes the fields of a tokenizer: words with a space before them, continuations without."""
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    written = [
        word if word in special else word.removeprefix("##") if word.startswith("##") else f"▁{word}" for word in words
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(written)
    writer.add_token_types([3 if word in special else 1 for word in words])
    writer.add_token_type_count(2)
    for name, word in (("bos", "[CLS]"), ("eos", "[SEP]"), ("unk", "[UNK]"), ("sep", "[SEP]"), ("pad", "[PAD]")):
        getattr(writer, f"add_{name}_token_id")(words.index(word))
    writer.add_mask_token_id(words.index("[MASK]"))
    normalizer = tokenizer.normalizer
    assert isinstance(normalizer, normalizers.BertNormalizer)
    if not normalizer.lowercase:
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", False)
    if normalizer.strip_accents is not None:
        writer.add_bool("tokenizer.ggml.normalizer.strip_accents", normalizer.strip_accents)


def unigram() -> Tokenizer:
    """A tokenizer as XLM-RoBERTa's, which maps tabs to spaces, and `A` and `B` to small letters."""
    made = Tokenizer(models.Unigram(list(_PIECES.items()), 3, byte_fallback=False))
    made.normalizer = normalizers.Precompiled(charsmap({"A": "a", "B": "b", "\t": " "}))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = [AddedToken(piece, special=True) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    made.add_special_tokens([*special, AddedToken("<mask>", special=True, lstrip=True, normalized=False)])
    return made


def charsmap(replaced: Mapping[str, str]) -> bytes:
    """What sentencepiece has of the replacements of ASCII characters: a double array, and texts that end with 0.

    A node has the distance to its children in bits 10 and up, whether a text ends there in bit 8, and its character.
    """
    units, texts = [0] * 1024, b""
    units[0] = 256 << 10
    for character, text in replaced.items():
        units[256 ^ ord(character)] = 512 << 10 | 1 << 8 | ord(character)
        units[768 ^ ord(character)] = 1 << 31 | len(texts)
        texts += text.encode() + b"\0"
    array = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(array)) + array + texts


def add_unigram(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """Writes the fields of a tokenizer as XLM-RoBERTa's."""
    model = json.loads(tokenizer.to_str())
    special = {token["content"]: token["id"] for token in model["added_tokens"]}
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _ in model["model"]["vocab"]])
    writer.add_token_scores([score for _, score in model["model"]["vocab"]])
    types = [2 if piece == "<unk>" else 3 if piece in special else 1 for piece, _ in model["model"]["vocab"]]
    writer.add_token_types(types)
    writer.add_add_space_prefix(True)
    writer.add_token_type_count(1)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(b64decode(model["normalizer"]["precompiled_charsmap"]))
    for name, piece in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"), ("sep", "</s>"), ("pad", "<pad>")):
        getattr(writer, f"add_{name}_token_id")(special[piece])
    writer.add_mask_token_id(special["<mask>"])
    for name in ("bos", "eos", "sep"):
        getattr(writer, f"add_add_{name}_token")(True)


def write_encoder_gguf(
    path: Path,
    case: EncoderCase,
    directory: Path,
    config: Any,
    add_tokenizer: Callable[[GGUFWriter], None],
    *,
    pooling: int | None = 1,
    stored: str = "F32",
    change: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """Writes the model of a directory. `stored` is the type of matrices; `change` adds or replaces what is written."""
    given, writer = config.to_dict(), GGUFWriter(path, case.architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - case.first_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(given.get("intermediate_size") or given["hidden_dim"])
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(given.get("layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    if "rope_parameters" in given:
        writer.add_rope_freq_base(given["rope_parameters"]["rope_theta"])
    add_tokenizer(writer)
    for name, tensor in load_file(directory / "model.safetensors").items():
        name = name.removeprefix("roberta.")
        if name.startswith("pooler."):
            continue
        numbers = tensor[case.first_position :] if "position" in name else tensor
        kind = stored if numbers.dim() > 1 and "position" not in name and "type" not in name else "F32"
        data = gguf.quantize(numbers.numpy(), GGMLQuantizationType[kind])
        writer.add_tensor(_name(name), data, raw_dtype=GGMLQuantizationType[kind])
    change(writer)
    return write_file(writer, path)


def round_to(model: Any, kind: str) -> None:
    """Rounds a model's matrices, but for positions and types, to what blocks of a type hold."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "position" not in name and "type" not in name:
            rounded = gguf.quantize(parameter.detach().numpy(), GGMLQuantizationType[kind])
            parameter.data = torch.from_numpy(gguf.dequantize(rounded, GGMLQuantizationType[kind]))


def _name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    match = _LAYER.fullmatch(layer)
    return f"{_NAMES[layer]}.{kind}" if match is None else f"blk.{match[1]}.{_OF_LAYERS[match[2]]}.{kind}"
