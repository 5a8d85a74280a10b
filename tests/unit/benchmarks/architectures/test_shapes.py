"""The models that are compared: their sizes, and a checkpoint that transformers reads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.architectures.shapes import SHAPES

VOCAB_SIZE = 49_152


@pytest.mark.parametrize(("name", "millions"), [("dense", 300), ("experts", 300)])
def test_shapes_have_about_300_million_active_parameters(name: str, millions: int) -> None:
    config = AutoConfig.for_model(SHAPES[name].model_type, vocab_size=VOCAB_SIZE, **SHAPES[name].settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    active = 0
    for parameter_name, parameter in model.named_parameters():
        share = config.num_experts_per_tok / config.num_experts if ".experts." in parameter_name else 1.0
        active += int(parameter.numel() * share)
    active -= config.vocab_size * config.hidden_size  # a token reads one row of its embeddings
    assert active == pytest.approx(millions * 1e6, rel=0.15)


def test_a_checkpoint_has_the_tokenizer_and_the_dtype(tmp_path: Path) -> None:
    tokenizer, folder = tmp_path / "tokenizer", tmp_path / "model"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    shape = replace(SHAPES["experts"], config={**SHAPES["experts"].config, "num_hidden_layers": 1, "num_experts": 8})
    count = shape.write(folder, tokenizer, 100)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == count
