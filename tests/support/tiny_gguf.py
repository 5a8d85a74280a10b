"""Writes a tiny random decoder as a GGUF file, with tensors in any type of blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

HEADS, KV_HEADS = 4, 2
TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *("he", "ll"),
]
# Types that the package does not quantize to: where a block has scales in float16, and what makes numbers near 0.1.
_SCALES: Mapping[str, Mapping[int, float]] = {
    "Q2_K": {80: 8e-3, 82: 12e-3},
    "Q3_K": {108: 2.5e-3},
    "Q4_K": {0: 5e-4, 2: 37e-4},
    "Q5_K": {0: 25e-5, 2: 39e-4},
    "Q6_K": {208: 8e-5},
    "IQ4_NL": {0: 1.6e-3},
    "IQ4_XS": {0: 9e-5},
}


def as_q4_k_m(name: str) -> str:
    """The type of a matrix as llama.cpp makes Q4_K_M."""
    return {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"}.get(name.rpartition(".")[2], "Q4_K")


@dataclass(frozen=True, slots=True)
class TinyGguf:
    """What a file has: `stored` is the type of a matrix by its name, `norms` that of all vectors."""

    architecture: str = "llama"
    hidden: int = 64
    intermediate: int = 96
    layers: int = 2
    stored: Callable[[str], str] = lambda _: "F32"
    norms: str = "F32"
    tied: bool = True
    num_experts: int = 0
    left_out: str = ""
    context: int = 128
    more: Callable[[gguf.GGUFWriter], None] = lambda _: None
    """Adds further fields and tensors; a field that the file has already is replaced."""

    @property
    def head_dim(self) -> int:
        return self.hidden // HEADS


def random_blocks(random: np.random.Generator, rows: int, inputs: int, name: str) -> NDArray[np.uint8]:
    """A matrix in blocks of a type: rounded, or blocks of random bytes with such scales that its numbers are small."""
    kind = GGMLQuantizationType[name]
    if name not in _SCALES:
        return _as_bytes(gguf.quantize((random.standard_normal((rows, inputs)) * 0.1).astype(np.float32), kind))
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * inputs // numbers, num_bytes), dtype=np.uint8)
    for at, size in _SCALES[name].items():
        scales = size * random.uniform(0.5, 1.5, (len(blocks), 1))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _as_bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    return data.view(np.uint8).reshape(len(data), -1)


def replaced(name: str, value: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Replaces a field of a file; None: removes it."""

    def change(writer: gguf.GGUFWriter) -> None:
        (fields,) = writer.kv_data
        fields.pop(name, None)
        if value is not None:
            add_field(writer, name, value)

    return change


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """Adds a field of the type of its value."""
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)


def write_file(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Writes what has been added, and returns the path of the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Writes the fields of a tokenizer of `TOKENS`."""
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_tiny_gguf(path: Path, model: TinyGguf | None = None) -> Path:
    model = TinyGguf() if model is None else model
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    if model.architecture == "starcoder2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(model.head_dim)
    if model.architecture != "llama":
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    if model.num_experts:
        writer.add_expert_count(model.num_experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(model.intermediate)
    write_tiny_tokenizer(writer)
    random = np.random.default_rng(0)

    def vector(name: str, size: int, mean: float = 1.0) -> None:
        numbers = mean + random.standard_normal(size) * 0.2
        kind = GGMLQuantizationType[model.norms]
        writer.add_tensor(f"{name}.weight", gguf.quantize(numbers.astype(np.float32), kind), raw_dtype=kind)

    def matrix(name: str, *shape: int) -> None:
        stored = model.stored(name)
        if name == model.left_out:
            return
        if stored in ("F32", "F16", "F64"):
            kind = np.dtype(f"float{stored[1:]}")
            writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.2).astype(kind))
            return
        blocks = [
            random_blocks(random, shape[-2], shape[-1], stored) for _ in range(shape[0] if len(shape) == 3 else 1)
        ]
        data = np.stack(blocks) if len(shape) == 3 else blocks[0]
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType[stored])

    hidden, kv_width, is_fused = model.hidden, KV_HEADS * model.head_dim, model.architecture == "phi3"
    matrix("token_embd", len(TOKENS), hidden)
    vector("output_norm", hidden)
    if not model.tied:
        matrix("output", len(TOKENS), hidden)
    for layer in range(model.layers):
        block = f"blk.{layer}"
        products = {"attn_q": hidden, "attn_k": kv_width, "attn_v": kv_width}
        for name, rows in {"attn_qkv": hidden + 2 * kv_width}.items() if is_fused else products.items():
            matrix(f"{block}.{name}", rows, hidden)
        matrix(f"{block}.attn_output", hidden, hidden)
        if model.architecture.startswith(("qwen3", "gemma3")):
            vector(f"{block}.attn_q_norm", model.head_dim)
            vector(f"{block}.attn_k_norm", model.head_dim)
        if model.num_experts:
            matrix(f"{block}.ffn_gate_inp", model.num_experts, hidden)
            for name, shape in (("gate", (model.intermediate, hidden)), ("up", (model.intermediate, hidden))):
                matrix(f"{block}.ffn_{name}_exps", model.num_experts, *shape)
            matrix(f"{block}.ffn_down_exps", model.num_experts, hidden, model.intermediate)
        else:
            if not is_fused:
                matrix(f"{block}.ffn_gate", model.intermediate, hidden)
            matrix(f"{block}.ffn_up", (1 + is_fused) * model.intermediate, hidden)
            matrix(f"{block}.ffn_down", hidden, model.intermediate)
        if model.architecture.startswith("gemma"):
            vector(f"{block}.post_attention_norm", hidden)
            vector(f"{block}.post_ffw_norm", hidden)
        vector(f"{block}.attn_norm", hidden)
        vector(f"{block}.ffn_norm", hidden)
    model.more(writer)
    return write_file(writer, path)
