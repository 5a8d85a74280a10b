"""Files of architectures that transformers' own reader dequantizes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import worker_svc.gguf.conversion
from svc_common.preparation import PreparationFailed
from tiny_gguf import TinyGguf, write_tiny_gguf
from worker_svc.gguf.conversion import GgufConversion

Convert = Callable[[TinyGguf], Path]


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Converts a file of Llama as one of an architecture that Quire does not read."""
    monkeypatch.setattr(worker_svc.gguf.conversion, "find_architecture", lambda _: None)

    def make(model: TinyGguf) -> Path:
        target = tmp_path / "theirs"
        target.mkdir()
        GgufConversion(write_tiny_gguf(tmp_path / "tiny.gguf", model), target, print).run(keeps_blocks=True)
        return target

    return make


def test_weights_are_float32_and_those_that_are_read_natively(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyGguf(stored=lambda _: "Q8_0")
    other = convert(model)
    theirs = load_file(other / "model.safetensors")
    monkeypatch.undo()
    ours = tmp_path / "ours"
    ours.mkdir()
    GgufConversion(tmp_path / "tiny.gguf", ours, print).run(keeps_blocks=False)
    found = load_file(ours / "model.safetensors")
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(found[name], tensor)
    dtypes = [json.loads((directory / "config.json").read_text())["dtype"] for directory in (ours, other)]
    assert dtypes == ["float32", "float32"]


def test_a_missing_tensor_is_not_made_up(convert: Convert) -> None:
    with pytest.raises(PreparationFailed, match=r"no tensors for model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(TinyGguf(left_out="blk.1.ffn_up"))


def test_fields_that_are_not_read_are_named(convert: Convert) -> None:
    with pytest.raises(PreparationFailed, match=r"metadata that is not read: llama\.logit_scale = 0\.5"):
        convert(replace(TinyGguf(), more=lambda writer: writer.add_logit_scale(0.5)))


def test_an_architecture_that_nobody_reads_is_named(convert: Convert) -> None:
    with pytest.raises(PreparationFailed, match=r"cannot convert .*: GGUF model with architecture plamo"):
        convert(TinyGguf(architecture="plamo"))
