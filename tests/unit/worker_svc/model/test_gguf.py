"""Blocks of GGUF against gguf's own dequantizer, and models that are computed with them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

import compiled
import llama_models
from joined_heads import joined_heads
from large import large_but
from quire_kernels.cpu.linear import MatrixFormat, PackedMatrix, linear
from runner_driver import Driver, make_runner
from tiny_gguf import KV_HEADS, TOKENS, TinyGguf, as_q4_k_m, random_blocks, write_tiny_gguf
from worker_svc.attention import CompiledKernels
from worker_svc.errors import UnsupportedModel
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.model.architecture import describe
from worker_svc.model.building import BuiltMlp
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.formats._gguf_blocks import BLOCK_TYPES
from worker_svc.model.formats.gguf import FORMAT, BlockWeight

TYPES = list(BLOCK_TYPES)
# Of which a scale or a minimum has more bits than products keep.
SCALED_SCALES = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}
IN_4_BITS = {"Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K"}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def _weight(name: str, rows: int = 5, inputs: int = 768) -> BlockWeight:
    blocks = random_blocks(np.random.default_rng(1), rows, inputs, name)
    return BlockWeight("layer", torch.from_numpy(blocks), BLOCK_TYPES[name])


@pytest.mark.parametrize("name", TYPES)
def test_the_numbers_of_blocks_are_those_of_the_package(name: str) -> None:
    weight = _weight(name)
    expected = torch.from_numpy(dequantize(weight.blocks.numpy(), GGMLQuantizationType[name]))
    assert torch.equal(weight.dense(), expected)
    assert torch.equal(weight.outputs(1, 4).dense(), expected[1:4])
    assert torch.equal(weight.inputs(256, 768).dense(), expected[:, 256:])
    codes = weight.block_codes()
    assert int(codes.codes.max()) < 2**codes.bits
    codes = codes.whole()
    groups = torch.arange(768) // codes.group
    numbers = (codes.codes.float() - codes.zero) * codes.scales[:, groups]
    if codes.minimums is not None:
        numbers += codes.minimums[:, groups]
    assert torch.equal(numbers, expected)


def test_many_blocks_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight("Q5_K", rows=7)
    expected, codes = weight.dense(), weight.block_codes()
    monkeypatch.setattr("worker_svc.model.formats.gguf._NUMBERS", 2000)
    assert torch.equal(weight.dense(), expected)
    again = weight.block_codes()
    assert codes.minimums is not None
    assert again.minimums is not None
    for one, other in ((codes.codes, again.codes), (codes.scales, again.scales), (codes.minimums, again.minimums)):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "cut"), [("Q4_0", 16), ("Q4_K", 32), ("Q6_K", 128)])
def test_a_block_is_not_cut(name: str, cut: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"blocks of {BLOCK_TYPES[name].numbers} inputs"):
        _weight(name).inputs(0, cut)


def test_another_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"q_proj is stored as 'IQ1_S'; the types that are read: Q4_0, Q4_1, .*"):
        FORMAT({"quant_method": "gguf", "types": {"model.layers.0.self_attn.q_proj": "IQ1_S"}})


Stored = Callable[[str], str]
Convert = Callable[..., tuple[Path, Path]]


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Writes a file with tensors of the types of `stored`, and converts it: with its blocks, and dequantized."""

    def make(stored: Stored, **sizes: Any) -> tuple[Path, Path]:
        model = replace(TinyGguf(hidden=256, intermediate=256, stored=stored), **sizes)
        gguf = write_tiny_gguf(tmp_path / "tiny.gguf", model)
        found = []
        for name in ("blocks", "dense"):
            (tmp_path / name).mkdir()
            GgufConversion(gguf, tmp_path / name, print).run(keeps_blocks=name == "blocks")
            found.append(tmp_path / name)
        return found[0], found[1]

    return make


def _built(directory: Path, weights: MatrixFormat, dtype: torch.dtype = torch.float32) -> Any:
    description = describe(read_config(directory))
    assert description is not None
    kernels = CompiledKernels(compiled.thread_pool(), weights)
    return load_compiled_model(description, directory, dtype, kernels).built


def _restored(matrix: PackedMatrix) -> Tensor:
    return linear(compiled.thread_pool(), torch.eye(matrix.inputs, dtype=matrix.dtype), matrix).t()


def _assert_held(matrix: PackedMatrix, numbers: Tensor, spread: float, *, is_gated: bool = False) -> None:
    held = _restored(matrix)
    if is_gated:
        held = held.view(-1, 2, 16, held.shape[1]).transpose(0, 1).flatten(0, 2)
    torch.testing.assert_close(held, numbers, rtol=0, atol=2**-11 * spread)


def test_missing_blocks_are_named(convert: Convert) -> None:
    blocks, _ = convert(lambda _: "Q8_0")
    tensors = load_file(blocks / "model.safetensors")
    tensors.pop("model.layers.1.mlp.down_proj.blocks")
    save_file(tensors, blocks / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.layers\.1\.mlp\.down_proj\.blocks"):
        _built(blocks, MatrixFormat.INT8)


@pytest.mark.parametrize(
    "asked",
    large_but(
        [MatrixFormat.INT8, MatrixFormat.W8A8, MatrixFormat.W4A16, MatrixFormat.W4A8],
        MatrixFormat.W8A8,
        MatrixFormat.W4A16,
    ),
)
@pytest.mark.parametrize("name", TYPES)
def test_a_model_is_computed_with_its_own_codes(name: str, asked: MatrixFormat, convert: Convert) -> None:
    """Whatever bits are asked of weights: those of activations are the setting's."""
    blocks, dense = convert(lambda _: name)
    meant, built = load_file(dense / "model.safetensors"), _built(blocks, asked)
    in_8_bits, in_4_bits = (
        (MatrixFormat.GROUPED_W8A8, MatrixFormat.W4A8)
        if asked.takes_codes
        else (MatrixFormat.GROUPED_W8A16, MatrixFormat.W4A16)
    )
    # Codes of e2m1 are whole numbers in 8 bits where products take codes.
    expected = in_4_bits if name in IN_4_BITS or (name == "MXFP4" and not asked.takes_codes) else in_8_bits
    layer = built.layers[1]
    assert isinstance(layer.mlp, BuiltMlp)
    for matrix in (built.head.matrix, layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
        assert matrix.matrix_format is expected
        assert matrix.group == BLOCK_TYPES[name].group
    if asked.takes_codes:
        return
    # A scale times a code, or a minimum, is off by 2**-12 of itself at most. Those of K blocks here are below 0.6.
    spread = 1.2 if name in SCALED_SCALES else 1e-3
    _assert_held(layer.qkv, _of_heads(meant, 1), spread)
    _assert_held(layer.output, meant["model.layers.1.self_attn.o_proj.weight"], spread)
    parts = [meant[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    _assert_held(layer.mlp.gate_up, torch.cat(parts), spread, is_gated=True)
    _assert_held(layer.mlp.down, meant["model.layers.1.mlp.down_proj.weight"], spread)
    _assert_held(built.head.matrix, meant["model.embed_tokens.weight"], spread)


def _of_heads(meant: dict[str, Tensor], layer: int) -> Tensor:
    """A layer's queries, keys and values, in the order of the compiled code."""
    parts = [meant[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
    return joined_heads(parts, len(parts[1]) // KV_HEADS)


def _mixed(name: str) -> str:
    """The types of Q4_K_M with others beside them."""
    return {"ffn_down": "Q5_1", "ffn_up": "F16", "attn_output": "F32"}.get(name.rpartition(".")[2], as_q4_k_m(name))


def test_types_may_be_mixed(convert: Convert) -> None:
    """A product in 4 bits with a part that needs 8 is in 8, and a part without blocks is rounded to 8."""
    blocks, dense = convert(_mixed)
    meant, built = load_file(dense / "model.safetensors"), _built(blocks, MatrixFormat.W4A16)
    layer = built.layers[0]
    assert layer.qkv.matrix_format is MatrixFormat.GROUPED_W8A16
    assert (layer.qkv.group, layer.qkv.has_minimums) == (16, True)
    _assert_held(layer.qkv, _of_heads(meant, 0), 1.2)
    assert (built.head.matrix.group, built.head.matrix.has_minimums) == (16, False)
    _assert_held(built.head.matrix, meant["model.embed_tokens.weight"], 1.2)
    _assert_held(layer.mlp.down, meant["model.layers.0.mlp.down_proj.weight"], 1e-3)
    assert layer.output.matrix_format is MatrixFormat.W4A16, "what the setting rounds dense weights to"
    gate, up = (meant[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    panels = _restored(layer.mlp.gate_up).view(-1, 2, 16, 256).transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(panels[0], gate, rtol=0, atol=1e-3)
    torch.testing.assert_close(panels[1], up, rtol=0, atol=float(up.abs().max()) / 127)


ASKED = llama_models.prompts(1, 5, 9, 16, 17, 30, 33, 40)


def _tokens(directory: Path, dtype: torch.dtype, **options: Any) -> list[list[int]]:
    prompts = [[token % len(TOKENS) for token in prompt] for prompt in ASKED]
    return Driver(make_runner(directory, "compiled", dtype=dtype, **options)).generate(prompts, 4)


@pytest.mark.parametrize("stored", [*TYPES, "Q4_K_M"])
def test_tokens_are_those_of_the_dequantized_model(stored: str, convert: Convert) -> None:
    """With scales of 11 bits, and activations in 8 bits, one or two near choices may be others."""
    blocks, dense = convert(as_q4_k_m if stored == "Q4_K_M" else lambda _: stored)
    expected = _tokens(dense, torch.float32)
    assert _tokens(blocks, torch.float32) == expected, "dequantized when it is read"
    kept = _tokens(blocks, torch.float32, weights=MatrixFormat.W4A16)
    same = sum(a == b for a, b in zip(kept, expected, strict=True))
    assert same >= len(expected) - (1 if stored in SCALED_SCALES | {"Q4_K_M"} else 0)
    first = [tokens[0] for tokens in expected]
    rounded = [tokens[0] for tokens in _tokens(blocks, torch.float32, weights=MatrixFormat.W4A8)]
    assert sum(a == b for a, b in zip(rounded, first, strict=True)) >= len(expected) - 2


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "head of its own"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_head_keeps_its_codes(architecture: str, convert: Convert, *, tied: bool) -> None:
    def stored(name: str) -> str:
        return {"token_embd": "Q4_1", "output": "Q8_0"}.get(name, "Q5_K")

    blocks, dense = convert(stored, tied=tied, architecture=architecture)
    meant, built = load_file(dense / "model.safetensors"), _built(blocks, MatrixFormat.W4A16)
    assert built.head.matrix.matrix_format is (MatrixFormat.W4A16 if tied else MatrixFormat.GROUPED_W8A16)
    _assert_held(built.head.matrix, meant["model.embed_tokens.weight" if tied else "lm_head.weight"], 1e-3)
    torch.testing.assert_close(built.embedding, meant["model.embed_tokens.weight"], rtol=0, atol=0)
    assert _tokens(blocks, torch.float32) == _tokens(dense, torch.float32)


@pytest.mark.parametrize("weights", [MatrixFormat.W4A16, MatrixFormat.W8A8], ids=lambda each: each.name)
@pytest.mark.parametrize("name", large_but(["Q8_0", "Q4_K", "Q3_K"], "Q4_K"))
def test_experts_keep_their_codes(name: str, weights: MatrixFormat, convert: Convert) -> None:
    def stored(tensor: str) -> str:
        return "F32" if tensor.endswith("ffn_gate_inp") else name

    blocks, dense = convert(stored, architecture="qwen3moe", num_experts=4)
    assert _tokens(blocks, torch.float32) == _tokens(dense, torch.float32)
    kept = _tokens(blocks, torch.float32, weights=weights)
    same = sum(a[0] == b[0] for a, b in zip(kept, _tokens(dense, torch.float32), strict=True))
    assert same >= len(ASKED) - 2
