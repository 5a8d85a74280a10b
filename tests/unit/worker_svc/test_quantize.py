"""A model that is written in fewer bits is read with the codes that were written, and samples about the same tokens."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, LlamaConfig

import llama_models
import transformers_models
from bert_models import save_bert, save_masked_model
from dense_modules import add_dense
from llama_models import SIZES
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from tiny_gguf import TinyGguf, write_tiny_gguf
from worker_svc.compressed_writer import scheme_named
from worker_svc.errors import UnsupportedModel
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.embedding_layers import load_layers
from worker_svc.model.weight_format import format_of, group_codes
from worker_svc.quantize import FORMATS, CannotWrite, main, quantize_model

Save = Callable[..., Path]

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 5, 9, 16, 17, 30, 33, 40)


def quantized(source: Path, target: Path, name: str = "w4a16", group: int = 32) -> int:
    return quantize_model(source, target, scheme_named(name, group), lambda line: None).num_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_near_the_one_that_was_written(
    name: str, dtype: torch.dtype, save_model: Save, tmp_path: Path
) -> None:
    source = save_model(LlamaConfig(**WIDE))
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert quantized(source, tmp_path / "out", name) == 7 * SIZES["num_hidden_layers"]
    written, weight_format = load_file(tmp_path / "out" / "model.safetensors"), format_of(tmp_path / "out")
    for key, tensor in tensors.items():
        layer = key.removesuffix(".weight")
        if not layer.endswith("_proj"):
            assert torch.equal(written[key], tensor)
            continue
        stored = {each: written[each] for each in weight_format.tensors(layer, *tensor.shape)}
        weight = weight_format.weight(layer, stored)
        step = tensor.float().abs().amax(1, keepdim=True) * (1 / 7.5 if name == "w4a16" else 1 / 127.5)
        # Scale and number are rounded to the dtype too.
        most = 0.51 * step + 2 * torch.finfo(dtype).eps * tensor.float().abs()
        assert bool(((weight.dense().float() - tensor.float()).abs() <= most).all())
        assert (group_codes(weight) is not None) == (name == "w4a16")


@pytest.mark.parametrize(
    ("name", "weights"),
    [("w8a8", MatrixFormat.W8A8), ("w8a16", MatrixFormat.INT8), ("w4a16", MatrixFormat.W4A16)],
    ids=FORMATS,
)
def test_its_codes_sample_about_the_tokens_of_what_they_mean(
    name: str, weights: MatrixFormat, save_model: Save, tmp_path: Path
) -> None:
    source = save_model(LlamaConfig(**WIDE))
    quantized(source, tmp_path / "out", name)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    tokens = [
        Driver(make_runner(tmp_path / "out", "compiled", weights=each)).generate(PROMPTS, 1)
        for each in (weights, MatrixFormat.PLAIN)
    ]
    assert sum(a == b for a, b in zip(*tokens, strict=True)) >= len(PROMPTS) - 2


def test_a_model_of_several_files_stays_one(save_model: Save, tmp_path: Path) -> None:
    source = save_model(LlamaConfig(**WIDE))
    tensors = load_file(source / "model.safetensors")
    quantized(source, tmp_path / "whole")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, source / part)
    index = {"metadata": {}, "weight_map": {key: part for part, keys in parts.items() for key in keys}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    quantized(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        of_file = load_file(tmp_path / "out" / part)
        assert {key for key, file in written["weight_map"].items() if file == part} == of_file.keys()
        found |= of_file
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in whole.items())
    assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert Driver(make_runner(tmp_path / "out")).generate(PROMPTS, 1)


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def test_layers_that_are_left_are_named(save_model: Save, tmp_path: Path) -> None:
    source = save_model(LlamaConfig(**{**WIDE, "intermediate_size": 80}))
    num_layers = SIZES["num_hidden_layers"]
    assert quantized(source, tmp_path / "out") == 6 * num_layers
    left = [f"model.layers.{layer}.mlp.down_proj" for layer in range(num_layers)]
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head", *left]
    assert Driver(make_runner(tmp_path / "out")).generate(PROMPTS, 1)


def test_heads_that_no_layer_is_are_named(tmp_path: Path) -> None:
    """Of pre-training: a reader that has them finds their numbers."""
    source = tmp_path / "masked"
    source.mkdir()
    save_masked_model(source, "modernbert")
    quantized(source, tmp_path / "out")
    assert {"head.dense", "decoder"} <= set(config_of(tmp_path / "out")["quantization_config"]["ignore"])


def test_experts_are_quantized_and_their_router_is_not(save_model: Save, tmp_path: Path) -> None:
    source = save_model(transformers_models.VARIANTS["mixtral"]())
    quantized(source, tmp_path / "out", "w8a16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    experts = [name for name in written if ".experts." in name]
    assert experts
    assert all(name.endswith(("weight_packed", "weight_scale", "weight_shape")) for name in experts)
    assert any(name.endswith("gate.weight") for name in written)
    assert Driver(make_runner(tmp_path / "out")).generate(PROMPTS, 1)


def test_tensors_of_all_experts_stay_as_they_are(save_model: Save, tmp_path: Path) -> None:
    config = GptOssConfig(**WIDE | {"num_hidden_layers": 1}, num_local_experts=3, num_experts_per_tok=2)
    source = save_model(config)
    quantized(source, tmp_path / "out", "w8a16")
    written, before = (load_file(path / "model.safetensors") for path in (tmp_path / "out", source))
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 4
    ignored = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert ignored.count("model.layers.0.mlp.experts.gate_up_proj") == 1
    assert all(torch.equal(written[name], before[name]) for name in experts)
    assert any(name.endswith("q_proj.weight_packed") for name in written)
    assert Driver(make_runner(tmp_path / "out")).generate(PROMPTS, 1)


@pytest.mark.parametrize(
    ("name", "group", "activations"),
    [("w8a8", None, 8), ("w8a16", None, None), ("w4a16", 32, None)],
    ids=FORMATS,
)
def test_the_config_says_what_was_written(
    name: str, group: int | None, activations: int | None, save_model: Save, tmp_path: Path
) -> None:
    quantized(save_model(LlamaConfig(**WIDE)), tmp_path / "out", name)
    fields = config_of(tmp_path / "out")["quantization_config"]["config_groups"]["group_0"]
    assert fields["weights"]["num_bits"] == int(name[1])
    assert (fields["weights"]["group_size"], fields["weights"]["symmetric"]) == (group, True)
    of_activations = fields["input_activations"]
    assert (of_activations is None) == (activations is None)
    assert of_activations is None or of_activations["num_bits"] == activations


def test_what_cannot_be_quantized_is_said(save_model: Save, tmp_path: Path) -> None:
    source = save_model(LlamaConfig(**WIDE))
    quantized(source, tmp_path / "out")
    with pytest.raises(CannotWrite, match="out exists already"):
        quantized(source, tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="is quantized already"):
        quantized(tmp_path / "out", tmp_path / "again")
    with pytest.raises(UnsupportedModel, match="has no linear layer that could be quantized"):
        quantized(save_model(transformers_models.VARIANTS["gpt2"]()), tmp_path / "again")
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    save_bert(encoder)
    with pytest.raises(UnsupportedModel, match="is an encoder: only QUIRE_QUANTIZATION"):
        quantized(encoder, tmp_path / "again")
    shutil.rmtree(encoder)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].double()}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"the tensor {name} must be a matrix of 96 inputs in float32.*float64"):
        quantized(source, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing is left of what failed"


def test_the_command_prints_the_directory(
    save_model: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = save_model(LlamaConfig(**WIDE)), tmp_path / "out"
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["quantize", str(source), str(out), "--format", "w4a16", "--group-size", "32"])
    main()
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert printed.err == f"quire: {7 * SIZES['num_hidden_layers']} linear layers are in w4a16\n"
    with pytest.raises(SystemExit, match=r"^quire: .*out exists already$"):
        main()


@pytest.mark.parametrize(("name", "group"), [("w4a16", 32), ("w8a8", None)])
def test_a_program_may_read_what_was_written(
    name: str,
    group: int | None,
    save_model: Save,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = save_model(LlamaConfig(**WIDE)), tmp_path / "out"
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["quantize", str(source), str(out), "--format", name, "--json"])
    main()
    assert json.loads(capsys.readouterr().out) == {
        "path": str(out),
        "format": name,
        "group_size": group,
        "layers": 7 * SIZES["num_hidden_layers"],
        "bytes": sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values()),
    }


def test_a_gguf_file_is_dequantized_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", TinyGguf(stored=lambda _: "Q8_0"))
    monkeypatch.setattr("sys.argv", ["quantize", str(gguf), str(tmp_path / "out"), "--format", "w4a16"])
    main()
    assert "14 linear layers are in w4a16" in capsys.readouterr().err
    assert "model.layers.0.mlp.up_proj.weight_packed" in load_file(tmp_path / "out" / "model.safetensors")


def test_an_empty_directory_is_used_as_it_is(save_model: Save, tmp_path: Path) -> None:
    """It may be where a volume is mounted. What a process that was killed has left is removed."""
    source, out = save_model(LlamaConfig(**WIDE)), tmp_path / "out"
    (out / ".quantizing" / "1_Pooling").mkdir(parents=True)
    before = out.stat().st_ino
    quantized(source, out)
    assert out.stat().st_ino == before
    assert not (out / ".quantizing").exists()
    assert not (out / "1_Pooling").exists()
    assert (out / "config.json").exists()


def test_two_processes_do_not_write_to_one_directory(save_model: Save, tmp_path: Path) -> None:
    source, out = save_model(LlamaConfig(**WIDE)), tmp_path / "out"
    folder = out / ".quantizing"
    folder.mkdir(parents=True)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (folder / "model.safetensors").write_text("of the other process")
    with pytest.raises(CannotWrite, match=r"another process writes to .*out"):
        quantized(source, out)
    assert (folder / "model.safetensors").exists()
    os.close(descriptor)
    quantized(source, out)


def test_the_modules_of_an_embedding_model_are_kept(save_model: Save, tmp_path: Path) -> None:
    source, out = save_model(LlamaConfig(**WIDE)), tmp_path / "out"
    module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (source / "modules.json").write_text(json.dumps([module]))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    add_dense(source, 96, 64, bias=True, activation="torch.nn.modules.activation.Tanh")
    quantized(source, out)
    defaults = embedding_defaults(out)
    assert defaults == embedding_defaults(source)
    vectors = torch.randn(3, 96)
    written, original = (load_layers(defaults.layers, 96, folder, torch.device("cpu"))[0] for folder in (out, source))
    assert torch.equal(written(vectors), original(vectors))


def test_the_chat_templates_of_a_model_are_kept(save_model: Save, tmp_path: Path) -> None:
    source, out = save_model(LlamaConfig(**WIDE)), tmp_path / "out"
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    quantized(source, out)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_a_directory_that_cannot_be_made_is_said_in_a_line(
    save_model: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    monkeypatch.setattr("sys.argv", ["quantize", str(save_model(LlamaConfig(**WIDE))), str(out), "--format", "w8a16"])
    with pytest.raises(SystemExit, match=r"^quire: .*Not a directory: .*file/out"):
        main()
