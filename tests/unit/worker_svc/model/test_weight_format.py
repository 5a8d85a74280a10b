"""A weight format is one module or entry point that every backend can load; unknown formats are rejected by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import llama_models
from distributions import install, set_version
from llama_models import SIZES
from runner_driver import Driver, make_runner
from transformers_models import VARIANTS as OTHERS
from worker_svc.attention import AttentionKind
from worker_svc.errors import StartupFailed, UnsupportedModel
from worker_svc.fingerprint import model_fingerprint
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.description import LinearLayer, LinearRole, SplitDimension, StoredLinear
from worker_svc.model.linear_weights import LinearWeights, Shard
from worker_svc.model.loading import load
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint

Save = Callable[..., Path]

# Another package's: bytes with a scale for each output, the first 4 bits of which are the second half of the inputs.
_NIBBLES = '''
import torch
from worker_svc.errors import UnsupportedModel


class Nibbles:
    """Two codes of 4 bits in a byte."""

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def outputs(self, start, stop):
        return Nibbles(self.codes[start:stop], self.scales[start:stop])

    def inputs(self, start, stop):
        if start % 2 or stop % 2:
            raise UnsupportedModel("nibbles cannot be cut within a byte")
        return Nibbles(self.codes[:, start // 2 : stop // 2], self.scales)

    def dense(self):
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten(1).float() - 8
        return codes * self.scales


class NibbleFormat:
    def read_as(self, name):
        return name

    def tensors(self, layer, outputs, inputs):
        if layer == "lm_head":
            return {"lm_head.weight": (outputs, inputs)}
        return {f"{layer}.codes": (outputs, inputs // 2), f"{layer}.scales": (outputs, 1)}

    def weight(self, layer, tensors):
        from worker_svc.model.formats.dense import DenseWeight

        if layer == "lm_head":
            return DenseWeight(tensors["lm_head.weight"])
        return Nibbles(tensors[f"{layer}.codes"], tensors[f"{layer}.scales"])


def make(quantization):
    if quantization.get("bits") != 4:
        raise UnsupportedModel(f"nibbles of {quantization.get('bits')} bits are not read")
    return NibbleFormat()
'''


@pytest.fixture
def nibbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that registers the format."""
    install(monkeypatch, tmp_path / "site", "nibbles", "quire.weight_formats", "nibbles = nibble_format:make", _NIBBLES)


def _change_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def _load(directory: Path) -> None:
    load(directory, describe(read_config(directory)), torch.float32, torch.device("cpu"), AttentionKind.TORCH)


def _pack(directory: Path, packed: Path) -> None:
    """Quantizes a model so that `packed` holds the codes of the weights in `directory`."""
    tensors = load_file(directory / "model.safetensors")
    packed.mkdir()
    codes_of: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        scales = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scales).round() + 8
        tensors[name] = (codes - 8) * scales
        pairs = codes.to(torch.uint8).view(len(codes), -1, 2)
        layer = name.removesuffix(".weight")
        codes_of |= {f"{layer}.codes": pairs[..., 0] << 4 | pairs[..., 1], f"{layer}.scales": scales}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith("_proj.weight")}
    save_file(rest | codes_of, packed / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (packed / name).write_text((directory / name).read_text())
    _change_config(packed, quantization_config={"quant_method": "nibbles", "bits": 4})


@pytest.mark.usefixtures("nibbles")
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_a_format_of_another_package_computes_what_its_dense_weights_do(
    kernels: str, save_model: Save, tmp_path: Path, reference: Callable[..., list[list[int]]]
) -> None:
    directory = save_model(LlamaConfig(**SIZES))
    packed = tmp_path / "packed"
    _pack(directory, packed)
    prompts = llama_models.prompts(1, 17, 40)
    drawn = Driver(make_runner(packed, kernels)).generate(prompts, 12)
    assert drawn == reference(directory, prompts, 12)


@pytest.mark.usefixtures("nibbles")
def test_packed_weights_are_cut_into_parts_and_ranks_before_they_are_unpacked(tmp_path: Path) -> None:
    qkv = LinearLayer(LinearRole.QKV, 12, (StoredLinear("qkv", (8, 4, 4)),), SplitDimension.OUTPUTS, split_unit=2)
    down = LinearLayer(LinearRole.DOWN, 12, (StoredLinear("down", (6,)),), SplitDimension.INPUTS)
    generator = torch.Generator().manual_seed(0)
    dense: dict[str, torch.Tensor] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, outputs in (("qkv", 16), ("down", 6)):
        codes = torch.randint(256, (outputs, 6), generator=generator, dtype=torch.uint8)
        scales = torch.rand(outputs, 1, generator=generator)
        stored |= {f"{name}.codes": codes, f"{name}.scales": scales}
        dense[name] = (torch.stack([codes >> 4, codes & 15], -1).flatten(1).float() - 8) * scales
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "nibbles", "bits": 4}}))

    def read(layer: LinearLayer, shard: Shard) -> torch.Tensor:
        checkpoint = Checkpoint(tmp_path, format_of(tmp_path), torch.float32, torch.device("cpu"))
        return LinearWeights(layer, checkpoint, shard).fused()[0]

    assert torch.equal(read(qkv, Shard()), dense["qkv"])
    second = torch.cat([part.chunk(2)[1] for part in torch.split(dense["qkv"], [8, 4, 4])])
    assert torch.equal(read(qkv, Shard(1, 2)), second)
    assert torch.equal(read(down, Shard(2, 3)), dense["down"][:, 8:])
    with pytest.raises(UnsupportedModel, match="cannot be cut within a byte"):
        read(down, Shard(1, 4))


@pytest.mark.usefixtures("nibbles")
def test_a_variant_that_a_format_does_not_read_is_refused(save_model: Save) -> None:
    directory = _change_config(
        save_model(LlamaConfig(**SIZES)), quantization_config={"quant_method": "nibbles", "bits": 3}
    )
    with pytest.raises(UnsupportedModel, match="nibbles of 3 bits"):
        _load(directory)


@pytest.mark.usefixtures("nibbles")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("make = 7", "must be a function of a quantization_config, not of the type int"),
        ("def make(quantization): return quantization['group_size']", "failed: KeyError: 'group_size'"),
    ],
    ids=["value", "raises"],
)
def test_a_format_that_cannot_be_made_is_refused_by_its_package(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "site" / "nibble_format.py").write_text(source)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "nibbles"}}))
    with pytest.raises(StartupFailed, match=f"^quire.weight_formats: nibbles of the package nibbles {message}$"):
        format_of(tmp_path)


@pytest.mark.usefixtures("nibbles")
def test_the_fingerprint_changes_with_the_package_of_a_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "nibbles", "bits": 4}}))
    save_file({}, tmp_path / "model.safetensors")
    fingerprints = [model_fingerprint(tmp_path, torch.float32) for _ in range(2)]
    set_version(tmp_path / "site", "nibbles", "1.1")
    fingerprints.append(model_fingerprint(tmp_path, torch.float32))
    (tmp_path / "site" / "nibble_format.py").write_text(_NIBBLES.replace("- 8", "- 7"))
    fingerprints.append(model_fingerprint(tmp_path, torch.float32))
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


@pytest.mark.usefixtures("nibbles")
def test_what_transformers_computes_must_be_dense(save_model: Save) -> None:
    directory = _change_config(save_model(OTHERS["phi"]()), quantization_config={"quant_method": "nibbles", "bits": 4})
    with pytest.raises(UnsupportedModel, match="which transformers' modules do not read"):
        _load(directory)


@pytest.mark.usefixtures("nibbles")
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_format_that_is_not_registered_is_refused_with_those_that_are(key: str, save_model: Save) -> None:
    for config in (LlamaConfig(**SIZES), OTHERS["phi"]()):
        directory = _change_config(save_model(config), **{key: {"quant_method": "none-such"}})
        with pytest.raises(UnsupportedModel, match=r"none-such, which is not read; .* read: .*dense.*nibbles"):
            _load(directory)


def test_a_config_that_names_no_format_is_dense(save_model: Save) -> None:
    directory = save_model(LlamaConfig(**SIZES))
    assert format_of(directory).tensors("layer", 3, 4) == {"layer.weight": (3, 4)}
    assert type(format_of(_change_config(directory, quantization_config=None))) is type(format_of(directory))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "{key} must be an object, not []"),
        ("gptq", "{key} must be an object, not 'gptq'"),
        (False, "{key} must be an object, not False"),
        ({}, "the format unnamed, which is not read"),
        ({"bits": 4}, "the format unnamed, which is not read"),
        ({"quant_method": None}, "the format None, which is not read"),
        ({"quant_method": "dense"}, "the format dense, which is that of models without"),
    ],
    ids=str,
)
def test_a_config_that_names_no_known_format_is_refused(value: object, message: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: value}))
    with pytest.raises(UnsupportedModel, match=re.escape(message.format(key=key))):
        format_of(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.bias",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
    ],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_without_a_format_are_refused(dtype: torch.dtype, name: str, save_model: Save) -> None:
    directory = save_model(LlamaConfig(**SIZES, mlp_bias=True))
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, name: tensors[name].to(dtype)}, directory / "model.safetensors")
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(StartupFailed, match=f"{name} is {kind}, and config.json names no format"):
        _load(directory)
