"""The GGUF files that are compared: the default model's own, and a Llama of 1.1 billion random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from benchmarks.formats import LARGE_SHAPE
from benchmarks.runner import log
from tiny_gguf import random_blocks, write_file
from worker_svc.prepare import fetch_default_gguf

_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS = (
    LARGE_SHAPE.config[name]
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
)
_CONTEXT = 2048


@dataclass(frozen=True)
class ComparedFile:
    """A file, how it is written into a folder, and Quire's QUIRE_QUANTIZATION for it, which keeps its codes."""

    title: str
    quantization: str
    write: Callable[[Path], Path]


def _default(folder: Path) -> Path:
    return fetch_default_gguf(folder, log)


def _random(stored: str) -> Callable[[Path], Path]:
    """Writes the Llama, with the tokenizer of the default model, and all its matrices in one type of blocks."""

    def write(folder: Path) -> Path:
        tokenizer = GGUFReader(_default(folder))
        path = folder / f"random-{stored.lower()}.gguf"
        writer = GGUFWriter(path, "llama")
        num_tokens = _copy_tokenizer(tokenizer, writer)
        writer.add_block_count(_LAYERS)
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(_HIDDEN)
        writer.add_feed_forward_length(_INTERMEDIATE)
        writer.add_head_count(_HEADS)
        writer.add_head_count_kv(_KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(_HIDDEN // _HEADS)
        writer.add_vocab_size(num_tokens)
        random = np.random.default_rng(0)

        def matrix(name: str, rows: int, inputs: int) -> None:
            blocks = random_blocks(random, rows, inputs, stored)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType[stored])

        def norm(name: str) -> None:
            writer.add_tensor(f"{name}.weight", np.ones(_HIDDEN, np.float32))

        matrix("token_embd", num_tokens, _HIDDEN)
        norm("output_norm")
        for layer in range(_LAYERS):
            norm(f"blk.{layer}.attn_norm")
            norm(f"blk.{layer}.ffn_norm")
            kv_width = _KV_HEADS * _HIDDEN // _HEADS
            for name, rows in (("q", _HIDDEN), ("k", kv_width), ("v", kv_width), ("output", _HIDDEN)):
                matrix(f"blk.{layer}.attn_{name}", rows, _HIDDEN)
            matrix(f"blk.{layer}.ffn_gate", _INTERMEDIATE, _HIDDEN)
            matrix(f"blk.{layer}.ffn_up", _INTERMEDIATE, _HIDDEN)
            matrix(f"blk.{layer}.ffn_down", _HIDDEN, _INTERMEDIATE)
        return write_file(writer, path)

    return write


def _copy_tokenizer(reader: GGUFReader, writer: GGUFWriter) -> int:
    """Copies the fields of a tokenizer, and returns the number of its tokens."""
    num_tokens = 0
    for name, field in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)
        if name == "tokenizer.ggml.tokens":
            num_tokens = len(value)
    return num_tokens


FILES = {
    "default-q4_1": ComparedFile("SmolLM2-135M, Q4_1", "w4a8", _default),
    "random-q8_0": ComparedFile("Llama of 1.1 billion random weights, Q8_0", "w8a8", _random("Q8_0")),
    "random-q4_k": ComparedFile("Llama of 1.1 billion random weights, Q4_K", "w4a8", _random("Q4_K")),
}
