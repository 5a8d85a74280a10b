"""GGUF files of each architecture that is read, against transformers' models that they are made of."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from kept_codes import assert_codes_are_multiplied_as_numbers
from llama_models import generate, prompts, save_model
from model_gguf import CASES, GgufCase, write_model_gguf
from runner_driver import Driver, make_runner
from svc_common.preparation import PreparationFailed
from tiny_gguf import replaced
from transformers_models import save_with_choice_biases
from worker_svc.gguf.architecture import architecture_names
from worker_svc.gguf.conversion import GgufConversion

# Prompts longer than windows, of which some tokens are beyond the original context of stretched positions
PROMPTS = prompts(1, 9, 37)
# Those of which tests of their own read files.
ELSEWHERE = {
    *("bert", "eurobert", "gemma-embedding", "gemma2", "gemma3", "gemma4", "modern-bert", "nomic-bert", "phi3"),
    *("qwen2", "qwen3", "qwen3moe"),
}

Change = Callable[[GGUFWriter], None]
Convert = Callable[..., tuple[Path, Path]]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """Directories of transformers' model, and of what is made of its GGUF file."""

    def make(case: GgufCase, *, keeps_blocks: bool = True, **written: Any) -> tuple[Path, Path]:
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        ours.mkdir()
        theirs.mkdir()
        save_with_choice_biases(lambda config: save_model(theirs, config), case.config())
        model = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
        path = write_model_gguf(tmp_path / "tiny.gguf", case, model, **written)
        GgufConversion(path, ours, print).run(keeps_blocks=keeps_blocks)
        return theirs, ours

    return make


def test_every_architecture_has_a_case() -> None:
    names = {case.architecture for case in CASES.values()} | ELSEWHERE
    modules = {"".join(letter if letter.isalnum() else "_" for letter in name) for name in names}
    assert modules == set(architecture_names())


def test_the_docs_have_every_architecture() -> None:
    page = (Path(__file__).parents[4] / "docs/design/models.md").read_text()
    listed = page[page.index("are read natively: ") : page.index(". Their matrices in the types of blocks above")]
    assert set(re.findall(r"`([^`]+)`", listed)) == {case.architecture for case in CASES.values()} | ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, converted: Convert) -> None:
    theirs, ours = converted(CASES[name])
    expected = generate(theirs, PROMPTS, 8)
    for kernels in ("torch", "compiled"):
        assert Driver(make_runner(ours, kernels, num_blocks=64)).generate(PROMPTS, 8) == expected


@pytest.mark.parametrize("name", CASES)
def test_blocks_keep_their_codes(name: str, converted: Convert) -> None:
    """Layers are multiplied with the codes that torch's operators see as numbers."""
    case = CASES[name]
    kind = "MXFP4" if case.architecture == "gpt-oss" else "Q8_0"
    _, ours = converted(case, stored=case.stored(kind))
    types = json.loads((ours / "config.json").read_text())["quantization_config"]["types"]
    assert set(types.values()) == {kind}
    assert any("embed" in layer or layer.endswith("wte") for layer in types)
    assert not case.is_mixture or any(".experts." in layer for layer in types)
    assert_codes_are_multiplied_as_numbers(ours, PROMPTS[-1], atol=1e-3)


def _assert_tokens(directories: tuple[Path, Path]) -> None:
    theirs, ours = directories
    expected = generate(theirs, PROMPTS, 8)
    assert Driver(make_runner(ours, "torch", num_blocks=64)).generate(PROMPTS, 8) == expected


@pytest.mark.parametrize("name", ["gpt-oss", "gpt2", "deepseek-v2", "nemotron", "granite-moe"])
def test_a_file_may_be_dequantized(name: str, converted: Convert) -> None:
    directories = converted(CASES[name], keeps_blocks=False)
    assert "quantization_config" not in json.loads((directories[1] / "config.json").read_text())
    _assert_tokens(directories)


def _tensors(writer: GGUFWriter) -> dict[str, Any]:
    (tensors,) = writer.tensors
    return tensors


@pytest.mark.parametrize("name", ["granite-biased", "phi2", "glm4", "qwen3-vl"])
def test_queries_keys_and_values_may_be_one_tensor(name: str, converted: Convert) -> None:
    def fuse(writer: GGUFWriter) -> None:
        tensors = _tensors(writer)
        for layer in range(2):
            for kind in ("weight", "bias"):
                names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
                if names[0] in tensors:
                    parts = [tensors.pop(each).tensor for each in names]
                    writer.add_tensor(f"blk.{layer}.attn_qkv.{kind}", np.concatenate(parts))

    _assert_tokens(converted(CASES[name], change=fuse))


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "k-exaone"])
def test_layers_that_predict_further_tokens_are_left_out(name: str, converted: Convert) -> None:
    case = CASES[name]

    def predict(writer: GGUFWriter) -> None:
        writer.add_block_count(case.config().num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
        for each in ("attn_q", "nextn.eh_proj"):
            writer.add_tensor(f"blk.3.{each}.weight", np.ones((64, 64), np.float32))

    _assert_tokens(converted(case, change=predict))


def test_a_product_that_a_file_has_also_in_parts_is_the_whole_one(converted: Convert) -> None:
    def add_parts(writer: GGUFWriter) -> None:
        for layer in range(3):
            for part in "kv":
                writer.add_tensor(f"blk.{layer}.attn_{part}_b.weight", np.ones((4, 32, 32), np.float32))

    _assert_tokens(converted(CASES["deepseek-v3-first-files"], change=add_parts))


def test_gate_and_up_in_different_types_are_dequantized(converted: Convert) -> None:
    def stored(name: str) -> str:
        return {"gate": "MXFP4", "up": "Q8_0"}.get(name.removesuffix("_exps.weight").rpartition("_")[2], "F32")

    _, ours = converted(CASES["gpt-oss"], stored=stored)
    assert "quantization_config" not in json.loads((ours / "config.json").read_text())


def test_experts_whose_weights_are_not_scaled(converted: Convert) -> None:
    """llama.cpp takes a factor of 0 to be none."""
    _assert_tokens(converted(CASES["deepseek-v2-lite"], change=lambda writer: writer.add_expert_weights_scale(0.0)))


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        (
            "granite",
            replaced("granite.rope.scaling.finetuned", False),
            "not read: granite.rope.scaling.finetuned = False",
        ),
        ("dots1", replaced("dots1.expert_gating_func", None), "it has no metadata dots1.expert_gating_func"),
        ("minimax-m2", replaced("minimax-m2.expert_gating_func", 1), "not read: minimax-m2.expert_gating_func = 1"),
        ("deepseek-v3", replaced("deepseek2.expert_gating_func", 3), "not read: deepseek2.expert_gating_func = 3"),
        (
            "hunyuan-moe",
            replaced("hunyuan-moe.expert_shared_count", 2),
            "not read: hunyuan-moe.expert_shared_count = 2",
        ),
        ("ministral3", replaced("mistral3.rope.scaling.type", None), "mistral3.attention.temperature_scale = 0.5"),
        ("glm4", replaced("glm4.rope.dimension_sections", [4, 2, 2, 0]), "not read: glm4.rope.dimension_sections"),
        (
            "deepseek-v3",
            replaced("deepseek2.attention.temperature_scale", 1),
            "deepseek2.attention.temperature_scale = 1",
        ),
        (
            "deepseek-v3",
            replaced("deepseek2.attention.kv_lora_rank", None),
            "no metadata deepseek2.attention.kv_lora_rank",
        ),
        (
            "deepseek-v3",
            replaced("deepseek2.attention.kv_lora_rank", 64),
            "blk.0.attn_kv_a_norm.weight of the GGUF file is [32], not [64]",
        ),
        (
            "command-r",
            lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", np.ones((4, 16), np.float32)),
            "tensors that are not read: blk.0.attn_q_norm.weight",
        ),
        (
            "deepseek-v3",
            lambda writer: _tensors(writer).pop("blk.1.attn_v_b.weight"),
            "no tensor blk.1.attn_kv_b.weight, which is model.layers.1.self_attn.kv_b_proj.weight",
        ),
        (
            "gpt-oss",
            lambda writer: _tensors(writer).pop("blk.1.attn_sinks.weight"),
            "no tensor blk.1.attn_sinks.weight, which is model.layers.1.self_attn.sinks",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(case: str, change: Change, named: str, converted: Convert) -> None:
    with pytest.raises(PreparationFailed, match=re.escape(named)):
        converted(CASES[case], change=change)
