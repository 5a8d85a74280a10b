"""A backend rejects by name what it does not support; layers may differ in what it supports."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import compiled
from llama_models import SIZES, VOCAB, prompts
from runner_driver import Driver, make_runner
from worker_svc.attention import AttentionKind, CompiledKernels
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.building import BuiltMlp
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.description import (
    ComputedFormat,
    DecoderLayer,
    InvalidDescription,
    KVFormat,
    LinearLayer,
    MlpKind,
    ModelDescription,
    Norm,
    StoredLinear,
)
from worker_svc.model.loading import unsupported_natively
from worker_svc.model.torch_model import load_torch_model
from worker_svc.model.triton_model import load_triton_model
from worker_svc.step import SamplingParams

CPU = torch.device("cpu")
Change = Callable[[DecoderLayer], DecoderLayer]


@pytest.fixture(scope="module")
def description(tiny_llama: Path) -> ModelDescription:
    described = describe(read_config(tiny_llama))
    assert described is not None
    return described


def _attention(**changes: Any) -> Change:
    return lambda layer: replace(layer, attention=replace(layer.attention, **changes))


def _neighbours(rotated: int, **changes: Any) -> Change:
    def change(layer: DecoderLayer) -> DecoderLayer:
        return _attention(qkv=replace(layer.attention.qkv, rotated_neighbours=rotated), **changes)(layer)

    return change


def _mlp(**changes: Any) -> Change:
    return lambda layer: replace(layer, mlp=replace(layer.mlps[0], **changes))


def _norm(**changes: Any) -> Change:
    def change(layer: DecoderLayer) -> DecoderLayer:
        assert layer.mlp_norm is not None
        return replace(layer, mlp_norm=replace(layer.mlp_norm, **changes))

    return change


def _with_first(description: ModelDescription, change: Change) -> ModelDescription:
    first, *others = description.layers
    return replace(description, layers=(change(first), *others))


def _computed(computed: ComputedFormat) -> Change:
    return lambda layer: replace(
        layer,
        attention=replace(layer.attention, qkv=replace(layer.attention.qkv, computed=computed)),
        mlp=replace(layer.mlps[0], down=replace(layer.mlps[0].down, computed=computed)),
    )


NO_BACKEND: dict[str, Change] = {
    "a format of keys and values for each layer": _attention(kv_format=KVFormat.INT8),
}


@pytest.mark.parametrize("name", NO_BACKEND)
def test_what_no_backend_computes_is_refused_by_all(name: str, description: ModelDescription, tiny_llama: Path) -> None:
    kernels = CompiledKernels(compiled.thread_pool())
    changed = _with_first(description, NO_BACKEND[name])
    for who, call in (
        ("torch's operators", lambda: load_torch_model(changed, tiny_llama, torch.float32)),
        ("the Triton kernels", lambda: load_triton_model(changed, tiny_llama, torch.float32, CPU)),
        ("the compiled kernels", lambda: load_compiled_model(changed, tiny_llama, torch.float32, kernels)),
    ):
        with pytest.raises(UnsupportedModel, match=f"^{who} do not compute {name}"):
            call()
    for kind in (kernels, AttentionKind.TORCH):
        assert unsupported_natively(description, kind) is None
        assert re.match(name, unsupported_natively(changed, kind) or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_attention(num_kv_heads=3), r"^qkv: must be of the outputs \(384, 192, 192\)"),
        (_attention(num_kv_heads=4), "^num_heads: must be a multiple of 4"),
        (_attention(head_dim=32), "^qkv: must be"),
        (_mlp(width=33), r"^gate_up: must be of the outputs \(33, 33\)"),
        (_mlp(kind=MlpKind.PLAIN), "^gate_up: must be"),
        (_norm(size=47), "post_attention_layernorm.weight: must be of the size 48"),
        (lambda layer: _mlp(down=replace(layer.mlps[0].down, inputs=81))(layer), "^down: must be of 80 inputs"),
        (
            lambda layer: _mlp(gate_up=replace(layer.mlps[0].gate_up, inputs=47))(layer),
            "^gate_up: must be of 48 inputs",
        ),
        (lambda layer: _attention(key_norm=replace(layer.mlp_norm))(layer), "^key_norm: must be of the size 64"),
        (_neighbours(32), "^rotated_neighbours: must be 64"),
        (_neighbours(64, query_norm=Norm("q_norm", 64, 1e-6)), "^query_norm: must be absent, as key_norm, where neigh"),
    ],
)
def test_a_description_whose_sizes_do_not_fit_is_none(
    change: Change, message: str, description: ModelDescription
) -> None:
    with pytest.raises(ValueError, match=message):
        _with_first(description, change)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    # Triton's interpreter rounds bfloat16 wrongly.
    [(kernels, torch.float32) for kernels in ("torch", "compiled", "triton")]
    + [(kernels, torch.bfloat16) for kernels in ("torch", "compiled")],
    ids=str,
)
def test_a_bias_of_the_head_is_added_to_its_logits(
    kernels: str, dtype: torch.dtype, description: ModelDescription, tiny_llama: Path, tmp_path: Path
) -> None:
    biased = shutil.copytree(tiny_llama, tmp_path / "biased")
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    path = biased / "model.safetensors"
    save_file(load_file(path) | {"lm_head.bias": bias}, path)
    head: LinearLayer = replace(description.head, stored=(StoredLinear("lm_head", (VOCAB,), bias=True),))
    (prompt,), params = prompts(9), SamplingParams(logprobs=VOCAB)
    of = {}
    for directory, described in ((tiny_llama, description), (biased, replace(description, head=head))):
        driver = Driver(make_runner(directory, kernels, dtype=dtype, description=described))
        driver.generate([prompt], 1, params)
        of[directory] = torch.tensor([value for _, value in sorted(driver.logprobs[1][0].top)])
    expected = (of[tiny_llama] + bias.to(dtype).float()).log_softmax(-1)
    torch.testing.assert_close(of[biased], expected, rtol=0, atol=1e-4 if dtype is torch.float32 else 5e-2)


def test_a_head_that_is_the_embedding_has_no_bias(description: ModelDescription) -> None:
    head = replace(description.head, stored=(StoredLinear("lm_head", (VOCAB,), bias=True),))
    with pytest.raises(InvalidDescription, match=r"^head: must be without a bias where it is the embedding"):
        replace(description, head=head, tied_embeddings=True)


def test_queries_or_keys_alone_may_have_a_norm(description: ModelDescription, tiny_llama: Path, tmp_path: Path) -> None:
    normed = shutil.copytree(tiny_llama, tmp_path / "normed")
    path, norm = normed / "model.safetensors", replace(description.norm, tensor="query_norm", size=64)
    save_file(load_file(path) | {"query_norm": torch.linspace(0.5, 1.5, 64)}, path)
    changed = _with_first(description, _attention(query_norm=norm))
    runners = [
        make_runner(tiny_llama),
        *(make_runner(normed, kernels, description=changed) for kernels in ("torch", "compiled")),
    ]
    drivers = list(map(Driver, runners))
    for driver in drivers:
        driver.generate(prompts(9), 1, SamplingParams(logprobs=VOCAB))
    plain, by_torch, compiled_ones = (dict(driver.logprobs[1][0].top) for driver in drivers)
    assert by_torch == pytest.approx(compiled_ones, abs=2e-4)
    assert by_torch != pytest.approx(plain, abs=1e-2)
    with pytest.raises(UnsupportedModel, match="Triton kernels do not compute norms of queries or keys alone"):
        load_triton_model(changed, normed, torch.float32, CPU)


def test_all_that_is_not_computed_is_named(description: ModelDescription, tiny_llama: Path) -> None:
    changed = _with_first(_with_first(description, _computed(ComputedFormat.INT8)), _attention(kv_format=KVFormat.INT8))
    message = r"linear layers computed in int8, a format of keys and values for each layer, which this llama model has"
    with pytest.raises(UnsupportedModel, match=message):
        load_torch_model(changed, tiny_llama, torch.float32)


@pytest.mark.parametrize(
    ("computed", "name", "most"),
    [
        (ComputedFormat.INT8, "int8", 0.1),
        (ComputedFormat.W8A8, "W8A8", 0.1),
        (ComputedFormat.W4A16, "W4A16", 0.3),
        (ComputedFormat.W4A8, "W4A8", 0.3),
    ],
    ids=str,
)
def test_weights_in_fewer_bits_are_each_layers_own(
    computed: ComputedFormat, name: str, most: float, description: ModelDescription, tiny_llama: Path
) -> None:
    mixed = _with_first(description, _computed(computed))
    kernels = CompiledKernels(compiled.thread_pool())
    first, second = load_compiled_model(mixed, tiny_llama, torch.float32, kernels).built.layers
    quantized = [layer.qkv.scales is not None for layer in (first, second)]
    mlps = [layer.mlp for layer in (first, second) if isinstance(layer.mlp, BuiltMlp)]
    quantized += [mlp.down.scales is not None for mlp in mlps]
    assert quantized == [True, False, True, False]
    assert first.output.scales is None
    asked = prompts(1, 17, 40)
    params = SamplingParams(logprobs=VOCAB)
    message = {}
    for kind, described in (("mixed", mixed), ("dense", description)):
        driver = Driver(make_runner(tiny_llama, "compiled", description=described))
        driver.generate(asked, 1, params)
        message[kind] = torch.tensor([[value for _, value in sorted(driver.logprobs[s][0].top)] for s in (1, 2, 3)])
    error = (message["mixed"] - message["dense"]).norm() / message["dense"].norm()
    assert 0 < error < most
    with pytest.raises(UnsupportedModel, match=rf"Triton kernels .* linear layers computed in {name}"):
        load_triton_model(mixed, tiny_llama, torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match=rf"torch's operators .* linear layers computed in {name}"):
        load_torch_model(mixed, tiny_llama, torch.float32)


@pytest.mark.parametrize("kernels", ["compiled", "triton"])
def test_windows_scales_and_caps_are_each_layers_own(
    kernels: str, description: ModelDescription, tiny_llama: Path
) -> None:
    changed = _with_first(description, _attention(window=7, scale=0.2, soft_cap=1.5))
    params, asked = SamplingParams(logprobs=VOCAB), prompts(2, 18)
    by_torch = Driver(make_runner(tiny_llama, description=changed))
    plain, ours = (Driver(make_runner(tiny_llama, kernels, description=d), chunk=9) for d in (description, changed))
    expected = by_torch.generate(asked, 3, params)
    assert ours.generate(asked, 3, params) == expected
    plain.generate(asked, 3, params)
    for sequence, message in by_torch.logprobs.items():
        assert dict(ours.logprobs[sequence][0].top) == pytest.approx(dict(message[0].top), abs=2e-4)
    assert dict(plain.logprobs[2][0].top) != pytest.approx(dict(by_torch.logprobs[2][0].top), abs=2e-2)


def test_mlps_may_differ_in_width(description: ModelDescription, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    narrow_config = LlamaConfig(**SIZES | {"intermediate_size": 33})
    model.model.layers[0].mlp = LlamaMLP(narrow_config)  # type: ignore[no-untyped-call]
    model.eval()
    config.save_pretrained(tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )

    def narrow(layer: DecoderLayer) -> DecoderLayer:
        (mlp,) = layer.mlps
        gate_up = replace(mlp.gate_up, stored=tuple(replace(stored, outputs=(33,)) for stored in mlp.gate_up.stored))
        return _mlp(width=33, gate_up=gate_up, down=replace(mlp.down, inputs=33))(layer)

    changed = _with_first(description, narrow)
    (prompt,) = prompts(20)
    for kernels in ("torch", "compiled", "triton"):
        driver = Driver(make_runner(tmp_path, kernels, description=changed))
        (drawn,) = driver.generate([prompt], 3, SamplingParams(logprobs=VOCAB))
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
        for message, expected in zip(driver.logprobs[1], logits.log_softmax(-1), strict=True):
            ours = torch.tensor([value for _, value in sorted(message.top)])
            assert torch.allclose(ours, expected, atol=1e-4)


def test_the_compiled_kernels_refuse_a_cache_that_they_do_not_take(tiny_llama: Path) -> None:
    with pytest.raises(UnsupportedModel, match="block size must be 8 or a multiple of 16, not 24"):
        make_runner(tiny_llama, "compiled", block_size=24)
