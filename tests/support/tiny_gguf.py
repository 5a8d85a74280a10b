"""Writes a tiny random Llama as a GGUF file."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *("he", "ll"),
]


def write_tiny_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        writer.add_tensor(f"{name}.weight", (mean + random.standard_normal(shape) * 0.2).astype(np.float32))

    add("token_embd", len(TOKENS), HIDDEN)
    add("output_norm", HIDDEN, mean=1.0)
    for layer in range(LAYERS):
        for name, rows in (("attn_q", HIDDEN), ("attn_k", KV_HEADS * HEAD_DIM), ("attn_v", KV_HEADS * HEAD_DIM)):
            add(f"blk.{layer}.{name}", rows, HIDDEN)
        add(f"blk.{layer}.attn_output", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_up", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_down", HIDDEN, INTERMEDIATE)
        add(f"blk.{layer}.attn_norm", HIDDEN, mean=1.0)
        add(f"blk.{layer}.ffn_norm", HIDDEN, mean=1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
