"""What of a GGUF file is kept, and what is not read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distributions import install
from svc_common.preparation import PreparationFailed
from tiny_gguf import TinyGguf, write_tiny_gguf
from worker_svc.gguf.conversion import GgufConversion

Convert = Callable[[TinyGguf], Path]


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def convert(tmp_path: Path, reported: list[str]) -> Convert:
    def make(model: TinyGguf) -> Path:
        target = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        target.mkdir()
        GgufConversion(write_tiny_gguf(tmp_path / "tiny.gguf", model), target, reported.append).run(keeps_blocks=True)
        return target

    return make


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def test_blocks_stay_as_they_are_and_vectors_are_float32(convert: Convert, reported: list[str]) -> None:
    directory = convert(TinyGguf(stored=lambda name: "Q4_1" if "attn" in name else "Q8_0"))
    quantization = _config(directory)["quantization_config"]
    assert quantization["quant_method"] == "gguf"
    assert quantization["types"]["model.layers.1.self_attn.v_proj"] == "Q4_1"
    assert quantization["types"]["model.embed_tokens"] == "Q8_0"
    tensors = load_file(directory / "model.safetensors")
    assert tensors["model.layers.1.self_attn.v_proj.blocks"].shape == (32, 40)
    assert tensors["model.embed_tokens.blocks"].shape == (len(tensors["model.embed_tokens.blocks"]), 68)
    assert tensors["model.norm.weight"].dtype == torch.float32
    assert {name.rpartition(".")[2] for name in tensors} == {"blocks", "weight"}
    assert reported == []


def test_a_file_without_blocks_is_dense(convert: Convert) -> None:
    directory = convert(TinyGguf(stored=lambda _: "F16"))
    assert "quantization_config" not in _config(directory)
    assert load_file(directory / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.float16


def test_other_types_are_dequantized_and_reported(convert: Convert, reported: list[str]) -> None:
    model = TinyGguf(hidden=256, intermediate=256, stored=lambda name: "TQ2_0" if "ffn_up" in name else "Q4_K")
    directory = convert(model)
    assert "model.layers.0.mlp.up_proj" not in _config(directory)["quantization_config"]["types"]
    assert load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    (line,) = reported
    assert line.startswith("tensors that are dequantized: 2 of TQ2_0; Q4_0, Q4_1")


def test_a_type_that_cannot_be_read_is_named_with_those_that_can(convert: Convert) -> None:
    with pytest.raises(PreparationFailed, match=r"blk\.0\.attn_q\.weight .* stored as F64, .* F32, .*Q4_0, .*MXFP4 is"):
        convert(TinyGguf(stored=lambda name: "F64" if name.endswith("attn_q") else "F32"))


def test_a_missing_tensor_is_named(convert: Convert) -> None:
    with pytest.raises(PreparationFailed, match=r"no tensor blk\.1\.ffn_up\.weight, which is model\.layers\.1\.mlp"):
        convert(TinyGguf(left_out="blk.1.ffn_up"))


@pytest.mark.parametrize("norms", ["F32", "F16", "BF16"])
def test_norms_of_gemma_are_stored_less_one(norms: str, convert: Convert) -> None:
    """llama.cpp adds what transformers does when it computes."""
    from gguf import GGUFReader, dequantize

    directory = convert(TinyGguf(architecture="gemma2", stored=lambda _: "Q8_0", norms=norms))
    stored = {each.name: each for each in GGUFReader(directory.parent / "tiny.gguf").tensors}["output_norm.weight"]
    norm = load_file(directory / "model.safetensors")["model.norm.weight"]
    assert torch.equal(norm, torch.tensor(dequantize(stored.data, stored.tensor_type)) - 1)


def test_sizes_that_transformers_does_not_read_are_those_of_the_file(convert: Convert) -> None:
    directory = convert(TinyGguf(architecture="qwen3moe", num_experts=4, stored=lambda _: "F16"))
    config = _config(directory)
    assert (config["head_dim"], config["moe_intermediate_size"]) == (16, 96)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_named(share: float, tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    gguf.write_bytes(gguf.read_bytes()[: int(gguf.stat().st_size * share)])
    with pytest.raises(PreparationFailed, match=r"tiny\.gguf is damaged or not complete: "):
        GgufConversion(gguf, tmp_path, print).run(keeps_blocks=True)


_ORCHID = """
from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

made = GgufArchitecture(decoder(ConfigForm("llama")), has_rotated_neighbours=True)
"""


def test_another_package_may_register_an_architecture(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PreparationFailed, match="architecture orchid is not supported"):
        convert(TinyGguf(architecture="orchid"))
    install(monkeypatch, tmp_path / "site", "orchid", "quire.gguf_architectures", "orchid = orchid_gguf:made", _ORCHID)
    found, expected = (
        load_file(convert(TinyGguf(architecture=name, stored=lambda _: "Q8_0")) / "model.safetensors")
        for name in ("orchid", "llama")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
