"""Models with experts compute what transformers computes, on every backend and however tokens are batched."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoeConfig

import compiled
import transformers_models
from core_runner import serve_preempted
from large import large_but
from llama_models import prompts
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from runner_steps import Generate, new_sequence, run_step
from worker_svc.attention import AttentionKind, CompiledKernels
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.building import BuiltMlp, ExpertWeights, build_body
from worker_svc.model.config import read_config
from worker_svc.model.decoder_states import prompt_bytes
from worker_svc.model.description import (
    Activation,
    DecoderLayer,
    ExpertScores,
    ExpertsSpec,
    InvalidDescription,
    LinearLayer,
    LinearRole,
    MlpKind,
    MlpSpec,
    ModelDescription,
    SplitDimension,
    StoredLinear,
)
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.linear import Linear
from worker_svc.model.loading import load, unsupported_natively
from worker_svc.model.stored_linear import shapes_of
from worker_svc.model.tensor_names import described_names
from worker_svc.model.torch_experts import TorchExperts, build_torch_experts
from worker_svc.model.torch_layers import TorchBodyBuilder
from worker_svc.model.torch_mlp import TorchMlp
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint
from worker_svc.step import SamplingParams, ScheduledSequence

Save = Callable[..., Path]

# Of these, transformers saves tensors of each expert, and with an option of all of a layer.
OF_EACH_EXPERT = [
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "glm4-moe",
    "glm4-moe-biased",
    "dots1",
    "minimax-m2",
    "granite-moe",
    "k-exaone",
    "hunyuan-moe",
    "ernie4-5-moe",
    "ernie4-5-moe-alone",
]
FAMILIES = [*OF_EACH_EXPERT, "gpt-oss"]
CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = prompts(1, 15, 16, 17, 40, 65)
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, save_model: Save) -> Path:
    return transformers_models.save_with_choice_biases(save_model, transformers_models.VARIANTS[request.param]())


@pytest.fixture(scope="module")
def fused(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with one tensor for all experts of a layer."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    saved = tmp_path_factory.mktemp("fused")
    model.save_pretrained(saved, save_original_format=False)
    (saved / "tokenizer.json").write_text("{}")
    return saved


@pytest.fixture(scope="module")
def description(directory: Path) -> ModelDescription:
    described = describe(read_config(directory))
    assert described is not None
    return described


def _shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a description."""
    shapes = dict(description.shapes)
    for linear in description.linear_layers:
        for layer in linear.stored:
            shapes |= shapes_of(layer, linear.inputs, DenseFormat())
    return shapes


def test_tensors_are_those_that_transformers_saves(directory: Path, description: ModelDescription) -> None:
    stored, shapes = _tensors(directory), _shapes(description)
    places = described_names(description, stored)
    assert places.keys() == shapes.keys()
    assert {place.name for place in places.values()} == stored.keys()
    for name, place in places.items():
        assert place.is_stored_as(stored[place.name].shape, shapes[name]), name


@pytest.mark.parametrize("directory", OF_EACH_EXPERT, indirect=True)
def test_tensors_may_be_of_all_experts_of_a_layer(directory: Path, fused: Path, description: ModelDescription) -> None:
    assert sum(name.endswith(".experts.gate_up_proj") for name in _tensors(fused)) == len(_mixtures(description))
    assert not any("experts.0." in name for name in _tensors(fused))
    expected, checkpoint = (Checkpoint(each, format_of(each), torch.float32, CPU) for each in (directory, fused))
    for each in (expected, checkpoint):
        each.rename(described_names(description, each.names))
    for name, shape in _shapes(description).items():
        assert torch.equal(checkpoint.read(name, *shape), expected.read(name, *shape)), name
    checkpoint.check_all_taken()


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("directory", OF_EACH_EXPERT, indirect=True)
def test_tokens_are_the_same_of_tensors_of_all_experts(
    kernels: str, directory: Path, fused: Path, reference: Generate
) -> None:
    expected = reference(directory, PROMPTS, NUM_TOKENS)
    assert Driver(make_runner(fused, kernels)).generate(PROMPTS, NUM_TOKENS) == expected


@pytest.mark.parametrize("directory", OF_EACH_EXPERT, indirect=True)
def test_a_tensor_of_all_experts_of_another_shape_is_named(fused: Path, tmp_path: Path) -> None:
    tensors = _tensors(fused)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((fused / "config.json").read_text())
    num_experts, *rest = tensors[name].shape
    shape = re.escape(f"{name} of the model in {tmp_path} is {[num_experts, *rest]}, not [{num_experts}, 48, ")
    with pytest.raises(UnsupportedModel, match=shape):
        load(tmp_path, describe(read_config(tmp_path)), torch.float32, CPU, AttentionKind.TORCH)


def test_every_backend_computes_them(description: ModelDescription) -> None:
    compiled_kernels = CompiledKernels(compiled.thread_pool(), MatrixFormat.INT8)
    for kernels in (AttentionKind.TORCH, compiled_kernels, AttentionKind.TRITON):
        assert unsupported_natively(description, kernels) is None


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_tokens_are_those_of_transformers(kernels: str, directory: Path, reference: Generate) -> None:
    expected = reference(directory, PROMPTS, NUM_TOKENS)
    runner = make_runner(directory, kernels)
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected, "in a crowd"
    assert Driver(runner, chunk=7, ahead=1).generate(PROMPTS, NUM_TOKENS) == expected, "in chunks"
    driver = Driver(runner)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert driver.generate([prompt], NUM_TOKENS) == [tokens], "alone"
        again = prompt + tokens[:5]
        assert driver.generate([again], NUM_TOKENS - 5) == [tokens[5:]], "computed again, as after a preemption"


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_a_sequence_may_begin_behind_a_cached_prefix(kernels: str, directory: Path) -> None:
    prompt, runner = PROMPTS[-1], make_runner(directory, kernels)
    (whole,) = run_step(runner, [new_sequence(1, prompt)], ScheduledSequence(1, 0, len(prompt), [0, 1, 2, 3, 4]))
    (rest,) = run_step(runner, [new_sequence(2, prompt)], ScheduledSequence(2, 48, len(prompt) - 48, [0, 1, 2, 20, 21]))
    assert rest.token_ids == whole.token_ids


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize(("preemption", "num_host_blocks"), [("swap", 64), ("recompute", 0)])
def test_tokens_stay_the_same_with_cached_prefixes_and_preempted(
    kernels: str, preemption: str, num_host_blocks: int, directory: Path, reference: Generate
) -> None:
    shared, *longer = prompts(19, 1, 7, 8, 9, 15, 33, 50)
    asked = [*longer, *([*shared, *prompt] for prompt in longer[:4])]
    runner = make_runner(directory, kernels, block_size=8, num_blocks=16, num_host_blocks=num_host_blocks)
    served = serve_preempted(make_instance(runner), 16, preemption, asked, NUM_TOKENS)
    assert [one.token_ids for one in served] == reference(directory, asked, NUM_TOKENS)


@pytest.mark.parametrize("directory", large_but(FAMILIES, "qwen2-moe", "olmoe", "gpt-oss"), indirect=True)
def test_the_triton_kernels_compute_what_torch_does(directory: Path) -> None:
    """Prompts kernel by kernel, decodes by graphs."""
    asked, every = prompts(2, 18), SamplingParams(logprobs=transformers_models.VOCAB)
    by_torch = Driver(make_runner(directory))
    limits: dict[str, Any] = {"max_sequences": 2, "max_step_tokens": 18}
    ours = Driver(make_runner(directory, "triton", device=DEVICE, cuda_graphs=True, **limits), chunk=9)
    assert ours.generate(asked, 3, every) == by_torch.generate(asked, 3, every)
    for sequence_id, expected in by_torch.logprobs.items():
        for reported, by_modules in zip(ours.logprobs[sequence_id], expected, strict=True):
            assert dict(reported.top) == pytest.approx(dict(by_modules.top), abs=5e-4)


def test_an_expert_computes_the_tokens_that_chose_it(
    directory: Path, description: ModelDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is a row of as many experts as it has, and of no other one."""
    counts: list[int] = []

    class Counted:
        def __init__(self, linear: Linear) -> None:
            self._linear = linear

        def __call__(self, inputs: Tensor) -> Tensor:
            counts.append(len(inputs))
            return self._linear(inputs)

        def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
            return self._linear.add(inputs, residual)

    def counted(mlp: TorchMlp) -> TorchMlp:
        return BuiltMlp(mlp.spec, Counted(mlp.gate_up), mlp.down)

    class Builder(TorchBodyBuilder):
        def experts(self, weights: ExpertWeights) -> TorchExperts:
            built = build_torch_experts(weights)
            return replace(built, experts=list(map(counted, built.experts)))

    with torch.inference_mode():
        checkpoint = Checkpoint(directory, format_of(directory), torch.float32, CPU)
        layers = build_body(description, checkpoint, Builder()).layers
        mixtures = [layer.mlp for layer in layers if not isinstance(layer.mlp, BuiltMlp)]
        assert mixtures
        for mixture in mixtures:
            for num_tokens in (1, 9):
                counts.clear()
                mixture(torch.randn(num_tokens, description.hidden_size))
                assert sum(counts) == num_tokens * mixture.spec.num_chosen
                assert all(counts)
                assert len(counts) <= len(mixture.experts)


def test_layers_with_and_without_experts_may_alternate() -> None:
    described = describe(transformers_models.VARIANTS["qwen3-moe-mixed"]())
    assert described is not None
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in described.layers] == [False, True]


def test_what_a_prompt_takes_is_estimated() -> None:
    described = describe(transformers_models.VARIANTS["mixtral"]())
    assert described is not None
    assert prompt_bytes(described, 100, torch.float32) > prompt_bytes(described, 50, torch.float32) > 0


def _layers(change: Callable[[DecoderLayer], DecoderLayer]) -> Callable[[ModelDescription], ModelDescription]:
    return lambda description: replace(description, layers=tuple(map(change, description.layers)))


def _experts(**changes: Any) -> Callable[[ModelDescription], ModelDescription]:
    def change(layer: DecoderLayer) -> DecoderLayer:
        return layer if isinstance(layer.mlp, MlpSpec) else replace(layer, mlp=replace(layer.mlp, **changes))

    return _layers(change)


def _attention(layer: DecoderLayer, **changes: Any) -> DecoderLayer:
    return replace(layer, attention=replace(layer.attention, **changes))


def _whole_heads(layer: DecoderLayer) -> DecoderLayer:
    assert layer.attention.rope is not None
    return _attention(layer, rope=replace(layer.attention.rope, rotated_dims=None))


def _halves(layer: DecoderLayer) -> DecoderLayer:
    return _attention(layer, qkv=replace(layer.attention.qkv, rotated_neighbours=None))


def _positions_everywhere(description: ModelDescription) -> ModelDescription:
    (rope,) = {layer.attention.rope for layer in description.layers} - {None}
    return _layers(lambda layer: _attention(layer, rope=rope))(description)


def _without_head_norms(description: ModelDescription) -> ModelDescription:
    without = _layers(lambda layer: _attention(layer, query_norm=None, key_norm=None))(description)
    return replace(without, unused_suffixes=("q_norm.weight", "k_norm.weight"))


WITHOUT: dict[str, tuple[str, Callable[[ModelDescription], ModelDescription]]] = {
    "groups": ("glm4-moe", _experts(groups=None)),
    "norms of all heads together": ("minimax-m2", _without_head_norms),
    "the factor of the logits": ("granite-moe", lambda description: replace(description, logits_scale=1.0)),
    "sigmoids": ("glm4-moe", _experts(scores=ExpertScores.SOFTMAX)),
    "the factor": ("glm4-moe", _experts(scale=1.0)),
    "weights that are not normalised": ("glm4-moe-biased", _experts(normalized=True)),
    "the window": ("dots1", _layers(lambda layer: _attention(layer, window=None))),
    "the layer without positions": ("k-exaone", _positions_everywhere),
    "the pairs of neighbours": ("ernie4-5-moe", _layers(_halves)),
    "the part that is not rotated": ("glm4-moe", _layers(_whole_heads)),
}
"""A description without one of its features, and the variant that has it."""


@pytest.mark.parametrize("feature", WITHOUT)
def test_each_feature_changes_the_result(feature: str, save_model: Save) -> None:
    name, change = WITHOUT[feature]
    directory = transformers_models.save_with_choice_biases(save_model, transformers_models.VARIANTS[name]())
    described = describe(read_config(directory))
    assert described is not None
    tops = []
    for each in (described, change(described)):
        driver = Driver(make_runner(directory, description=each))
        driver.generate([PROMPTS[-1]], 1, SamplingParams(logprobs=transformers_models.VOCAB))
        ((reported,),) = driver.logprobs.values()
        tops.append(dict(reported.top))
    assert tops[0] != pytest.approx(tops[1], abs=1e-3)


def test_clipped_queries_are_left_to_transformers() -> None:
    assert describe(OlmoeConfig(clip_qkv=1.0)) is None


def test_8_bits_sample_mostly_the_same_tokens(directory: Path, reference: Generate) -> None:
    sampled = Driver(make_runner(directory, "compiled", weights=MatrixFormat.INT8)).generate(PROMPTS, 1)
    expected = reference(directory, PROMPTS, 1)
    assert sum(a == b for a, b in zip(sampled, expected, strict=True)) >= len(PROMPTS) - 2


def test_a_missing_expert_is_named(save_model: Save) -> None:
    directory = save_model(transformers_models.VARIANTS["mixtral"]())
    tensors = _tensors(directory)
    missing = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[missing]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"no tensor {re.escape(missing)}"):
        load(directory, describe(read_config(directory)), torch.float32, CPU, AttentionKind.TORCH)


def _tensors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def _mixtures(description: ModelDescription) -> list[ExpertsSpec]:
    return [layer.mlp for layer in description.layers if isinstance(layer.mlp, ExpertsSpec)]


def _router(*outputs: int) -> LinearLayer:
    stored = tuple(StoredLinear(f"router{number}", (width,)) for number, width in enumerate(outputs))
    return LinearLayer(LinearRole.ROUTER, 8, stored, SplitDimension.OUTPUTS)


def _mlp(width: int = 4, **changes: Any) -> MlpSpec:
    gate_up = tuple(StoredLinear(name, (width,)) for name in ("gate", "up"))
    made = MlpSpec(
        width,
        LinearLayer(LinearRole.GATE_UP, 8, gate_up, SplitDimension.OUTPUTS),
        LinearLayer(LinearRole.DOWN, width, (StoredLinear("down", (8,)),), SplitDimension.INPUTS),
    )
    return replace(made, **changes)


def _plain() -> MlpSpec:
    up = LinearLayer(LinearRole.GATE_UP, 8, (StoredLinear("up", (4,)),), SplitDimension.OUTPUTS)
    return _mlp(kind=MlpKind.PLAIN, gate_up=up)


def _biased() -> MlpSpec:
    down = LinearLayer(LinearRole.DOWN, 4, (StoredLinear("down", (8,), bias=True),), SplitDimension.INPUTS)
    return _mlp(down=down)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": _router(3)}, r"^router: must be of the outputs \(2,\)"),
        ({"router": _router(2, 2), "shared": _mlp(6)}, r"^router: must be of the outputs \(2, 1\)"),
        ({"router": _router(2, 1)}, "^router: must be without a gate where no MLP is shared"),
        ({"num_chosen": 3}, "^num_chosen: must be 1 to 2 experts"),
        ({"num_chosen": 0}, "^num_chosen: must be 1 to 2 experts"),
        ({"experts": (_mlp(), _plain())}, "^experts: must be gated MLPs"),
        ({"experts": (_mlp(), _mlp(activation=Activation.GELU))}, "^experts: must be MLPs with the activation silu"),
        ({"experts": (_mlp(), _mlp(5))}, "^experts: must be of the width 4"),
        ({"experts": (_mlp(), _biased())}, "^experts: must be all with biases, or all without"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    made = ExpertsSpec(_router(2), 1, True, (_mlp(), _mlp()), _mlp(6))
    with pytest.raises(InvalidDescription, match=message):
        replace(made, **{"shared": None} | changes)
