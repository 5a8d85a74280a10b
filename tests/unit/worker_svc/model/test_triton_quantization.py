"""Quantized weights by the Triton kernels: codes of checkpoints are kept, others are rounded; models compute what their
products mean; tokens do not depend on prefixes, preemption or the batch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DeepseekV2Config, LlamaConfig, OlmoeConfig

import dense_models
import latent_models
import llama_models
import transformers_models
from core_runner import CoreRunner, submission
from interpreted_float8 import round_float8
from large import large_but
from llama_models import SIZES, VOCAB
from ordered_dots import order_dots
from quantized_models import (
    Quantize,
    compressed_config,
    in_act_order,
    in_order,
    quantize,
    quantize_fp8,
    save_quantized,
    with_dense_head,
)
from quire_kernels.coded_rows import code_rows_reference
from quire_kernels.scaled_linear import CodedMatrix
from quire_kernels.weight_only_matrix import WeightOnlyMatrix
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from tiny_gguf import TinyGguf, as_q4_k_m, write_tiny_gguf
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.model import torch_experts
from worker_svc.model.architecture import describe
from worker_svc.model.building import BuiltMlp
from worker_svc.model.config import read_config
from worker_svc.model.device_formats import Quantization
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.stored_linear import StoredCodes
from worker_svc.model.torch_layers import TorchBodyBuilder
from worker_svc.model.triton_model import TritonModel, load_triton_model
from worker_svc.model.triton_products import CodedProduct, DenseProduct, WeightOnlyProduct, build_product
from worker_svc.step import SamplingParams

Save = Callable[..., Path]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERY_TOKEN = SamplingParams(logprobs=VOCAB)
WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(2, 18)
# Biases, tied embeddings, weights that are stored transposed, layers side by side, norms of updates, vectors of layers,
# latent attention
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama_models.VARIANTS["llama-tied-biased"],
    "qwen3": llama_models.VARIANTS["qwen3"],
    "gpt2": transformers_models.VARIANTS["gpt2"],
    "gpt-neox": transformers_models.VARIANTS["gpt-neox"],
    "gemma2": transformers_models.VARIANTS["gemma2"],
    "gemma4-small": dense_models.VARIANTS["gemma4-small"],
    "experts": transformers_models.VARIANTS["qwen2-moe"],
    "latents": lambda: DeepseekV2Config(**latent_models._V2 | {"first_k_dense_replace": 3, "q_lora_rank": 16}),
}


@pytest.fixture(autouse=True)
def _rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_float8(monkeypatch)


_ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_TINY: dict[str, Any] = {**transformers_models.COMMON, **_ONE_LAYER, "num_key_value_heads": 1}
SMALL: dict[str, Callable[[], Any]] = {
    "dense": lambda: LlamaConfig(**_TINY, head_dim=16),
    "experts": lambda: OlmoeConfig(**_TINY, num_experts=3, num_experts_per_tok=2),
}
"""For the interpreter."""
# Every format with and without experts; other models with one whose rows are in codes
CASES = [(model, each) for model in ("llama", "experts") for each in Quantization]
CASES += [(model, Quantization.W8A8) for model in MODELS if model not in ("llama", "experts")]
USUAL_CASES = (
    *(("llama", each) for each in Quantization),
    ("experts", Quantization.W4A16),
    ("gemma4-small", Quantization.W8A8),
)


class Decoded:
    """A linear layer of torch that multiplies the numbers which a product's codes mean."""

    def __init__(self, weights: LinearWeights, quantization: Quantization) -> None:
        product = build_product(weights, quantization, deterministic=False)
        assert isinstance(product, CodedProduct | WeightOnlyProduct)
        self._weight, self._bias, self._coding = product.weight.dense(), product.bias, product.coding
        order = product.order if isinstance(product, WeightOnlyProduct) else None
        self._weight = self._weight if order is None else self._weight[:, order.argsort()]

    def __call__(self, inputs: Tensor) -> Tensor:
        rows = inputs if self._coding is None else code_rows_reference(inputs, self._coding).decoded(self._coding.group)
        return torch.nn.functional.linear(rows, self._weight, self._bias)

    def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self(inputs))


@pytest.mark.parametrize(("model", "quantization"), large_but(CASES, *USUAL_CASES, unpack=True), ids=str)
def test_models_compute_what_their_products_mean(
    model: str, quantization: Quantization, save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(MODELS[model]())
    how: dict[str, Any] = {"device": DEVICE, "quantization": quantization}
    triton = Driver(make_runner(directory, "triton", **how), chunk=9)
    num_tokens = 3 if torch.cuda.is_available() else 2  # interpreted, each takes seconds
    sampled = triton.generate(PROMPTS, num_tokens, EVERY_TOKEN)
    dense = Driver(make_runner(directory, "torch"))
    dense.generate(PROMPTS, 1, EVERY_TOKEN)
    monkeypatch.setattr(TorchBodyBuilder, "linear", lambda _, weights: Decoded(weights, quantization))
    monkeypatch.setattr(
        torch_experts,
        "_mlp",
        lambda mlp: BuiltMlp(mlp.spec, *(Decoded(each, quantization) for each in (mlp.gate_up, mlp.down))),
    )
    meant = Driver(make_runner(directory, "torch"))
    assert sampled == meant.generate(PROMPTS, num_tokens, EVERY_TOKEN)
    agree = [
        dict(reported.top) == pytest.approx(dict(wanted.top), abs=2e-4)
        for sequence_id, every in meant.logprobs.items()
        for reported, wanted in zip(triton.logprobs[sequence_id], every, strict=True)
    ]
    # The last bits of a norm decide which code a number between two becomes: that changes all that follows.
    assert all(agree) or (quantization in (Quantization.W8A8, Quantization.FP8) and sum(agree) >= len(agree) / 2)
    # It is not the model in its own dtype.
    assert dict(triton.logprobs[2][0].top) != pytest.approx(dict(dense.logprobs[2][0].top), abs=1e-3)


def _load(directory: Path, quantization: Quantization, dtype: torch.dtype = torch.float32) -> TritonModel:
    description = describe(read_config(directory))
    assert description is not None
    return load_triton_model(description, directory, dtype, torch.device(DEVICE), quantization=quantization)


def _parts(model: TritonModel) -> dict[str, Any]:
    """The products of the second layer, by the names of what they were made of."""
    layer, _ = model.body._layers[1]
    mlp: Any = layer.mlp
    return {
        "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj": layer.qkv,
        "self_attn.o_proj": layer.output,
        "mlp.gate_proj,mlp.up_proj": mlp.gate_up,
        "mlp.down_proj": mlp.down,
    }


def _meant(directory: Path, names: str) -> Tensor:
    stored = load_file(directory / "model.safetensors")
    return torch.cat([stored[f"model.layers.1.{name}.weight"] for name in names.split(",")]).float().to(DEVICE)


def _gptq(bits: int, group: int, *, in_act_order_of: int | None = None) -> Quantize:
    def quantized(layer: str, weight: Tensor) -> Any:
        inputs = weight.shape[1]
        groups = in_order(inputs, group) if in_act_order_of is None else in_act_order(inputs, group, in_act_order_of)
        made = quantize(weight, bits, groups, sym=bits == 8)
        return made.gptq(layer), made.dense()

    return with_dense_head(quantized)


def _compressed(group: int, *, sym: bool) -> Quantize:
    def quantized(layer: str, weight: Tensor) -> Any:
        made = quantize(weight, 8, in_order(weight.shape[1], group), sym=sym)
        return made.packed(layer, sym=sym), made.dense()

    return with_dense_head(quantized)


def _fp8(block: tuple[int, int] | None) -> Quantize:
    def quantized(layer: str, weight: Tensor) -> Any:
        made = quantize_fp8(weight, block)
        return {f"{layer}.weight": made.codes, f"{layer}.weight_scale": made.scales.view(-1) if block is None
                else made.scales}, made.dense()  # fmt: skip

    return with_dense_head(quantized)


def _of_gptq(bits: int, group: int, *, act_order: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}


def _of_fp8(block: tuple[int, int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": None if block is None else list(block)}


KEPT = {
    "w4a16 of GPTQ": (Quantization.W4A16, _gptq(4, 32), _of_gptq(4, 32)),
    "w4a16 of GPTQ in act-order": (
        Quantization.W4A16, _gptq(4, 32, in_act_order_of=3), _of_gptq(4, 32, act_order=True),
    ),
    "int8 of GPTQ": (Quantization.INT8, _gptq(8, -1), _of_gptq(8, -1)),
    "w8a8 of GPTQ": (Quantization.W8A8, _gptq(8, -1), _of_gptq(8, -1)),
    "w8a8 of groups of GPTQ": (Quantization.W8A8, _gptq(8, 32), _of_gptq(8, 32)),
    "w4a16 of groups of 8 bits of compressed-tensors": (
        Quantization.W4A16, _compressed(64, sym=True), compressed_config("pack-quantized", 8, 64, sym=True),
    ),
    "fp8 of groups of 8 bits of compressed-tensors with zero points": (
        Quantization.FP8, _compressed(32, sym=False), compressed_config("pack-quantized", 8, 32, sym=False),
    ),
    "fp8 of one scale": (Quantization.FP8, _fp8(None), _of_fp8(None)),
    "fp8 of blocks": (Quantization.FP8, _fp8((128, 128)), _of_fp8((128, 128))),
    "fp8 of small blocks of outputs": (Quantization.FP8, _fp8((32, 128)), _of_fp8((32, 128))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", KEPT)
def test_codes_of_a_checkpoint_are_kept(case: str, dtype: torch.dtype, save_model: Save, tmp_path: Path) -> None:
    quantization, made, config = KEPT[case]
    directory = save_model(LlamaConfig(**WIDE | {"hidden_size": 192, "intermediate_size": 256}))
    packed = save_quantized(directory, tmp_path / "packed", made, quantization_config=config)
    model = _load(packed, quantization, dtype)
    for names, product in _parts(model).items():
        dense, meant = product.weight.dense(), _meant(directory, names)
        order = getattr(product, "order", None)
        assert (order is not None) == ("act-order" in case)
        dense = dense if order is None else dense[:, order.argsort()]
        # Zero points of 8 bits become minimums, of 11 bits.
        close = 2e-4 * float(meant.abs().max()) if "zero points" in case else 1e-6
        torch.testing.assert_close(dense, meant, rtol=1e-3, atol=close)
    if "groups" in case:
        assert isinstance(product.weight, WeightOnlyMatrix)
        assert (product.weight.bits, product.weight.group) == (8, 32)
    if case == "fp8 of blocks":
        assert isinstance(product.weight, CodedMatrix)
        assert len(product.weight.scales) == 2


@pytest.mark.parametrize("quantization", Quantization)
def test_other_weights_are_rounded(quantization: Quantization, save_model: Save) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    most = {Quantization.W4A16: 0.1, Quantization.FP8: 0.04}.get(quantization, 0.01)
    for names, product in _parts(_load(directory, quantization)).items():
        meant = _meant(directory, names)
        error = (product.weight.dense() - meant).norm() / meant.norm()
        assert 0 < float(error) < most


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("stored", [as_q4_k_m, lambda _: "Q8_0", lambda _: "Q4_1"], ids=["Q4_K_M", "Q8_0", "Q4_1"])
def test_blocks_of_gguf_are_kept_in_every_format(
    stored: Callable[[str], str], quantization: Quantization, tmp_path: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", TinyGguf(hidden=256, intermediate=256, stored=stored))
    directories = [tmp_path / "blocks", tmp_path / "dense"]
    for directory, keeps_blocks in zip(directories, (True, False), strict=True):
        directory.mkdir()
        GgufConversion(file, directory, print).run(keeps_blocks=keeps_blocks)
    for names, product in _parts(_load(directories[0], quantization)).items():
        assert isinstance(product, WeightOnlyProduct)
        torch.testing.assert_close(product.weight.dense(), _meant(directories[1], names), rtol=2e-3, atol=1e-3)


def test_a_weight_of_zeros_and_one_that_is_not_finite(save_model: Save) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    for quantization in (Quantization.INT8, Quantization.W8A8, Quantization.FP8):
        for number in (0.0, float("nan")):
            description = describe(read_config(directory))
            assert description is not None
            weights = _Given(torch.full((4, 128), number, device=DEVICE))
            product: Any = build_product(weights, quantization, deterministic=False)  # type: ignore[arg-type]
            outputs = product(torch.ones(2, 128, device=DEVICE))
            assert torch.equal(outputs.nan_to_num(nan=7.0), torch.full_like(outputs, 0.0 if number == 0.0 else 7.0))


class _Given:
    """Weights of one part, as `LinearWeights` has them."""

    codes = StoredCodes()
    dtype = code_dtype = torch.float32
    outputs = (4,)

    def __init__(self, weight: Tensor) -> None:
        self._weight, self.device = weight, weight.device
        self.code_scales, self.float8_scales = [torch.zeros(len(weight))], [None]

    def fused(self, dtype: torch.dtype | None = None) -> tuple[Tensor, None]:
        return self._weight, None


def _preempted() -> list[tuple[str, Quantization, str]]:
    """Models, formats and preemptions; interpreted kernels have one of the preemptions each, in turn."""
    models = [*(("dense", each) for each in Quantization), ("experts", Quantization.W8A8)]
    preemptions = ("swap", "recompute")
    return [
        (config, quantization, preemption)
        for place, (config, quantization) in enumerate(models)
        for preemption in (preemptions if torch.cuda.is_available() else (preemptions[place % 2],))
    ]


@pytest.mark.parametrize(
    ("config", "quantization", "preemption"),
    large_but(
        _preempted(),
        *(case for case in _preempted() if case[1] in (Quantization.W8A8, Quantization.W4A16)),
        unpack=True,
    ),
)
def test_tokens_stay_the_same_with_cached_prefixes_preempted_and_by_n(
    config: str, quantization: Quantization, preemption: str, save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    directory = save_model(SMALL[config]())
    how: dict[str, Any] = {"device": DEVICE, "quantization": quantization, "deterministic": True}
    make = partial(make_runner, directory, "triton", block_size=8, **how)
    shared, first, second, *others = llama_models.prompts(9, 1, 6, 7, 7)
    asked = [*others, [*shared, *first], [*shared, *second]]
    alone = [Driver(make()).generate([prompt], 3)[0] for prompt in asked]
    runner = make(num_blocks=3, num_host_blocks=16, max_sequences=4)
    core_runner = CoreRunner(make_instance(runner), 3, preemption)
    served = core_runner.serve(
        submission(str(place), prompt, 3, n=2 if place == 0 else 1) for place, prompt in enumerate(asked)
    )
    for place, expected in enumerate(alone):
        assert [one.token_ids for one in served[str(place)]] == [expected] * (2 if place == 0 else 1)
    assert core_runner.core.totals.cache_hits > 0
    assert core_runner.core.totals.preemptions > 0


@pytest.mark.parametrize(
    ("config", "quantization"),
    large_but(
        [*(("dense", each) for each in Quantization), ("experts", Quantization.W8A8), ("experts", Quantization.W4A16)],
        ("dense", Quantization.W4A16),
        ("experts", Quantization.W8A8),
        unpack=True,
    ),
)
def test_in_deterministic_mode_tokens_have_the_same_bits(
    config: str, quantization: Quantization, save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a crowd, in chunks and computed again."""
    order_dots(monkeypatch)
    directory = save_model(SMALL[config]())
    runner = make_runner(directory, "triton", device=DEVICE, quantization=quantization, deterministic=True)
    crowd = Driver(runner)
    prompts = llama_models.prompts(1, 16, 70)
    sampled = crowd.generate(prompts, 3, EVERY_TOKEN)
    for place, prompt in enumerate(prompts):
        alone = Driver(runner, chunk=43)
        assert alone.generate([prompt], 3, EVERY_TOKEN) == [sampled[place]]
        assert alone.logprobs[1] == crowd.logprobs[1 + place]
    resumed = Driver(runner)
    (rest,) = resumed.generate([prompts[1] + sampled[1][:2]], 1, EVERY_TOKEN)
    assert rest == sampled[1][2:]
    assert resumed.logprobs[1] == crowd.logprobs[2][2:]


@pytest.mark.parametrize("config", SMALL)
@pytest.mark.parametrize("quantization", [Quantization.W8A8, Quantization.W4A16])
def test_captured_graphs_sample_the_same_tokens(quantization: Quantization, config: str, save_model: Save) -> None:
    directory = save_model(SMALL[config]())
    how: dict[str, Any] = {"device": DEVICE, "quantization": quantization}
    plain = Driver(make_runner(directory, "triton", **how)).generate(PROMPTS, 4)
    assert Driver(make_runner(directory, "triton", cuda_graphs=True, **how), ahead=1).generate(PROMPTS, 4) == plain


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("stored", ["dense", "experts", "GGUF"])
def test_all_weights_are_on_the_models_device(
    stored: str, quantization: Quantization, save_model: Save, tmp_path: Path
) -> None:
    """A device without memory stands for a GPU."""
    if stored == "GGUF":
        file = write_tiny_gguf(tmp_path / "tiny.gguf", TinyGguf(hidden=256, intermediate=256, stored=as_q4_k_m))
        directory = tmp_path / "blocks"
        directory.mkdir()
        GgufConversion(file, directory, print).run(keeps_blocks=True)
    else:
        directory = save_model(SMALL[stored]())
    description = describe(read_config(directory))
    assert description is not None
    meta = torch.device("meta")
    model = load_triton_model(description, directory, torch.bfloat16, meta, quantization=quantization)
    (layer, _), *_ = model.body._layers
    mlp: Any = layer.mlp
    of_mlp = [mlp.products.gate_up, mlp.products.down] if stored == "experts" else [mlp.gate_up.weight, mlp.down.weight]
    products: list[Any] = [layer.qkv, layer.output]
    leaves = tree_leaves([*(each.weight for each in products), *of_mlp, *(each.bias for each in products)])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    assert len(tensors) >= 8
    assert {tensor.device for tensor in tensors} == {meta}


def test_the_head_stays_in_the_models_dtype(save_model: Save) -> None:
    model = _load(save_model(llama_models.VARIANTS["llama"]()), Quantization.W4A16, torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16


def test_dense_products_take_no_codes(save_model: Save) -> None:
    weights = _Given(torch.ones(4, 128, device=DEVICE))
    product = build_product(weights, None, deterministic=False)  # type: ignore[arg-type]
    assert isinstance(product, DenseProduct)
    assert product.coding is None
