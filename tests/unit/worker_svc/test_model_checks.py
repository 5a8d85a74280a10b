"""The checks of `quire doctor` for a model's files and its memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dense_models
import image_models
import latent_models
import llama_models
import transformers_models
from bert_models import save_bert, save_cross_encoder
from loaded_worker import load_worker
from quantized_models import in_order, quantize, quantize_fp8, save_quantized, with_dense_head
from svc_common.doctor.findings import CheckContext, Finding, Status
from svc_common.settings import read_settings
from worker_svc import memory_checks, model_checks
from worker_svc.errors import StartupFailed
from worker_svc.settings import WorkerSettings

MIB = 2**20


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of a small random model."""
    return shutil.copytree(tiny_llama, tmp_path / "tiny")


def of_model(model: Path, **settings: Any) -> Finding:
    context = CheckContext(WorkerSettings(model=str(model), device="cpu", **settings))
    (finding,) = model_checks.find_model_problems(context)
    return finding


def num_parameters_of(model: Path, **settings: Any) -> int:
    return model_checks.read_model(WorkerSettings(model=str(model), device="cpu", **settings)).num_parameters


def of_memory(model: Path, num_processes: int = 1, **settings: Any) -> Finding:
    context = CheckContext(WorkerSettings(model=str(model), device="cpu", **settings), num_processes=num_processes)
    (finding,) = memory_checks.find_memory_problems(context)
    return finding


def change_config(model: Path, **fields: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_complete_model(model: Path) -> None:
    finding = of_model(model)
    assert finding.status is Status.OK
    assert "llama" in finding.found
    assert "compiled kernels" in finding.found


def test_a_quantized_model_with_a_dense_head(model: Path, tmp_path: Path) -> None:
    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes = quantize(weight, 4, in_order(weight.shape[1], 16), sym=False)
        return codes.awq(layer), codes.dense()

    config = {"quant_method": "awq", "bits": 4, "group_size": 16}
    packed = save_quantized(model, tmp_path / "packed", with_dense_head(quantized), quantization_config=config)
    assert of_model(packed).status is Status.OK
    assert num_parameters_of(packed) == num_parameters_of(model)
    change_config(packed, quantization_config=config | {"group_size": 8})
    assert "qzeros of the model" in of_model(packed).problem


def test_a_model_in_fp8_with_scales_of_activations(model: Path, tmp_path: Path) -> None:
    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made, one = quantize_fp8(weight, None), torch.ones(())
        scale = {f"{layer}.weight_scale_inv": made.scales[0, 0].clone(), f"{layer}.activation_scale": one}
        return {f"{layer}.weight": made.codes, **scale}, made.dense()

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    packed = save_quantized(model, tmp_path / "packed", with_dense_head(quantized), quantization_config=config)
    assert of_model(packed).status is Status.OK
    change_config(packed, quantization_config=config | {"weight_block_size": [16, 16]})
    assert "weight_scale_inv of the model" in of_model(packed).problem


def test_a_model_that_follows_a_branch(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    shutil.move(model, repository / "snapshots" / "c0ffee")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def found(**settings: Any) -> list[Finding]:
        context = CheckContext(WorkerSettings(model="owner/tiny", device="cpu", **settings))
        return list(model_checks.find_model_problems(context))

    moving, complete = found()
    assert (moving.status, complete.status) == (Status.WARNING, Status.OK)
    assert "it is at c0ffee now" in moving.problem
    assert moving.next_step == "set QUIRE_REVISION to a commit"
    assert [finding.status for finding in found(revision="main")] == [Status.OK]
    missing, _ = found(revision="main", tokenizer="owner/other")
    assert missing.next_step == "set QUIRE_TOKENIZER_REVISION to a commit"


def test_files_that_are_missing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "it has no model.safetensors" in of_model(model).problem
    (model / "config.json").unlink()
    assert "it has no config.json" in of_model(model).problem


def test_a_config_that_is_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "config.json cannot be read" in of_model(model).problem


def test_a_file_that_was_not_copied_to_its_end(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    finding = of_model(model)
    assert (finding.status, "is damaged or not complete" in finding.problem) == (Status.WRONG, True)
    assert "download the model's files again" in finding.next_step


def test_a_shard_that_is_missing(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "has no weights file model-00002-of-00002.safetensors" in of_model(model).problem


def test_tensors_that_the_config_does_not_fit(model: Path) -> None:
    change_config(model, num_hidden_layers=3)
    assert "has no tensor model.layers.2." in of_model(model).problem
    change_config(model, num_hidden_layers=2, vocab_size=98)
    assert "not [98, 48]" in of_model(model).problem


def test_names_and_shapes_as_a_family_stores_them(tmp_path: Path) -> None:
    """GPT-2's own checkpoint: no prefix, transposed weights, masks."""
    llama_models.save_model(tmp_path, dense_models.VARIANTS["gpt2-tied-narrow"]())
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, path)
    finding = of_model(tmp_path)
    assert (finding.status, "computed by compiled kernels" in finding.found) == (Status.OK, True)
    save_file({name: tensor for name, tensor in tensors.items() if name != "h.1.mlp.c_fc.bias"}, path)
    assert "has no tensor transformer.h.1.mlp.c_fc.bias" in of_model(tmp_path).problem
    save_file(tensors | {"h.1.mlp.c_fc.weight": tensors["h.1.mlp.c_fc.weight"].t().contiguous()}, path)
    assert "h.1.mlp.c_fc.weight of the model in" in of_model(tmp_path).problem


def test_tensors_of_all_experts_of_a_layer(tmp_path: Path) -> None:
    llama_models.save_model(tmp_path, transformers_models.VARIANTS["mixtral"](), save_original_format=False)
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.gate_up_proj"
    finding = of_model(tmp_path)
    assert (finding.status, "computed by compiled kernels" in finding.found) == (Status.OK, True)
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous()}, path)
    assert (
        f"the tensor {name} of the model in {tmp_path} is [4, 48, 160], not [4, 160, 48]" in of_model(tmp_path).problem
    )


def test_a_model_that_also_takes_images(tmp_path: Path) -> None:
    """Only the text model counts, and experts may be stored as Qwen stores them."""
    image_models.save(tmp_path, image_models.VARIANTS["qwen3-vl-moe"]())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    of_text = sum(tensor.numel() for name, tensor in tensors.items() if not name.startswith("model.visual."))
    for change in (False, True):
        finding = of_model(tmp_path)
        assert (finding.status, "qwen3_vl_moe" in finding.found) == (Status.OK, True)
        assert "computed by compiled kernels" in finding.found
        assert num_parameters_of(tmp_path) == of_text
        assert of_memory(tmp_path, dtype="float32").status is Status.OK
        if not change:
            experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
            tensors |= {name: tensor.transpose(1, 2).contiguous() for name, tensor in experts.items()}
            save_file(tensors, path)


def test_architectures_that_nothing_computes(model: Path) -> None:
    change_config(model, model_type="unheard-of", architectures=["UnheardOf"])
    finding = of_model(model)
    assert (finding.status, "UnheardOf" in finding.problem) == (Status.WRONG, True)
    assert "docs/design/models.md" in finding.next_step
    change_config(model, model_type="t5", architectures=["T5ForConditionalGeneration"])
    assert "is an encoder-decoder" in of_model(model).problem


def test_an_architecture_of_transformers_alone(model: Path) -> None:
    change_config(model, model_type="olmo", architectures=["OlmoForCausalLM"])
    assert "transformers' own modules" in of_model(model).found


def test_latent_attention_is_computed_natively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_models.save_model(tmp_path, latent_models.VARIANTS["deepseek-v3"]())
    finding = of_model(tmp_path)
    assert finding.status is Status.OK
    assert "computed by compiled kernels" in finding.found
    monkeypatch.setattr(model_checks, "choose_device", lambda _: torch.device("cuda"))
    on_gpu = of_model(tmp_path)
    assert on_gpu.status is Status.OK
    assert "computed by Triton kernels" in on_gpu.found


def test_an_encoder_needs_supported_files_of_sentence_transformers(tmp_path: Path) -> None:
    save_bert(tmp_path / "mean")
    fine = of_model(tmp_path / "mean", max_model_len=100_000)  # a bound, which is above that of the model
    assert (fine.status, "as an encoder" in fine.found) == (Status.OK, True)
    save_bert(tmp_path / "max", pooling="max")
    assert "pools by pooling_mode_max_tokens" in of_model(tmp_path / "max").problem
    (tmp_path / "mean" / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    finding = of_model(tmp_path / "mean")
    assert (finding.status, "has a module Dense" in finding.problem) == (Status.WRONG, True)
    (tmp_path / "mean" / "modules.json").write_text("[")
    finding = of_model(tmp_path / "mean")
    assert (finding.status, "modules.json cannot be read" in finding.problem) == (Status.WRONG, True)
    assert finding.next_step == "correct the file, or download the model's files again"


def test_what_a_model_computes_is_checked(model: Path, tmp_path: Path) -> None:
    save_cross_encoder(tmp_path / "scores")
    for directory, task in ((tmp_path / "scores", "auto"), (model, "embed")):
        finding = of_model(directory, task=task)
        assert (finding.status, "as an encoder" in finding.found) == (Status.OK, True)
    found = of_model(tmp_path / "scores", kernels="torch").found
    assert "computed by torch's operators, as an encoder" in found
    save_bert(tmp_path / "wide", num_attention_heads=3)
    assert "computed by compiled kernels, as an encoder" in of_model(tmp_path / "wide").found
    finding = of_model(tmp_path / "scores", task="generate")
    assert (finding.status, "computes scores of pairs" in finding.problem) == (Status.WRONG, True)


@pytest.mark.parametrize(("device", "own", "size"), [("cpu", "compiled", 48), ("cuda", "triton", 264)])
def test_an_encoder_whose_heads_the_kernels_of_the_settings_refuse(
    device: str, own: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "choose_device", lambda _: torch.device(device))
    save_bert(tmp_path, hidden_size=size, num_attention_heads=4 if device == "cpu" else 1)
    finding = of_model(tmp_path, kernels=own)
    assert f"the {own} kernels cannot be used: " in finding.problem
    assert finding.next_step == f"set QUIRE_KERNELS to auto, not {own}"
    assert "torch's operators, since the" in of_model(tmp_path, kernels="auto").found


def test_what_computes_a_decoder_that_embeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 has a soft cap, which torch's attention over whole prompts does not know."""
    llama_models.save_model(tmp_path, dense_models.VARIANTS["gemma2"]())
    assert "computed by compiled kernels, as an encoder" in of_model(tmp_path, task="embed").found
    finding = of_model(tmp_path, task="embed", kernels="torch")
    assert (finding.status, "with a soft cap on attention scores" in finding.problem) == (Status.WRONG, True)
    monkeypatch.setattr(model_checks, "choose_device", lambda _: torch.device("cuda"))
    assert "computed by Triton kernels, as an encoder" in of_model(tmp_path, task="embed", dtype="float32").found
    assert of_model(tmp_path, task="embed", dtype="float32", kernels="torch").status is Status.WRONG


def test_an_encoder_is_quantized_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bert(tmp_path, num_attention_heads=3)
    settings = read_settings(WorkerSettings, ["--model", str(tmp_path), "--quantization", "w8a8"])
    assert model_checks.read_model(settings).quantization == "w8a8"
    assert "QUIRE_QUANTIZATION" in of_model(tmp_path, quantization="w8a8", kernels="torch").problem
    with monkeypatch.context() as patch:
        patch.setattr(model_checks, "choose_device", lambda _: torch.device("cuda"))
        assert model_checks.read_model(settings).quantization == "none"
    monkeypatch.setattr(memory_checks, "available_memory", lambda _=None: 1000)
    finding = of_memory(tmp_path)
    assert (finding.problem, "int8" in finding.next_step) == ("the weights do not fit in memory", False)


def test_a_context_beyond_the_model(model: Path) -> None:
    assert "QUIRE_MAX_MODEL_LEN" in of_model(model, max_model_len=100_000).problem


def test_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = of_memory(model)
    assert (fine.status, fine.found.startswith("for this model alone: ")) == (Status.OK, True)
    none = of_memory(model, cpu_kv_bytes=1000)
    assert (none.status, "raise QUIRE_CPU_KV_BYTES" in none.next_step) == (Status.WRONG, True)
    more = of_memory(model, cpu_kv_bytes=2**50)
    assert (more.status, "QUIRE_CPU_KV_BYTES" in more.problem) == (Status.WARNING, True)
    assert "QUIRE_SWAP_SPACE" in of_memory(model, swap_space=2**20).problem
    assert "QUIRE_NUM_BLOCKS" in of_memory(model, num_blocks=2**40).problem
    monkeypatch.setattr(memory_checks, "available_memory", lambda _=None: MIB // 8)
    assert of_memory(model).problem == "the weights do not fit in memory"


def test_a_stored_copy_of_the_embedding_takes_no_memory(model: Path) -> None:
    def weights() -> int:
        arguments: dict[str, Any] = {"model": str(model), "device": "cpu", "kernels": "torch", "dtype": "float32"}
        settings = WorkerSettings(**arguments)
        checked = model_checks.read_model(settings)
        return memory_checks.estimate_memory(settings, checked, torch.device("cpu"), 1).weights

    change_config(model, tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]

    def with_head(head: Tensor | None) -> int:
        tensors.pop("lm_head.weight", None)
        save_file(tensors if head is None else tensors | {"lm_head.weight": head}, model / "model.safetensors")
        return weights()

    assert with_head(embedding.clone()) == with_head(None)
    other = embedding.clone()
    other[-1, -1] += 1
    assert with_head(other) == with_head(None) + other.nbytes


def test_memory_of_codes_that_are_kept(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 bits that are asked, groups of 8 bits take 8."""

    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes = quantize(weight, 8, in_order(weight.shape[1], 16), sym=True)
        return codes.gptq(layer), codes.dense()

    config = {"quant_method": "gptq", "bits": 8, "group_size": 16}
    packed = save_quantized(model, tmp_path / "packed", with_dense_head(quantized), quantization_config=config)
    monkeypatch.setattr(memory_checks, "available_memory", lambda _=None: 2**34)

    def weights_of(directory: Path, quantization: Any) -> int:
        arguments: dict[str, Any] = {"model": str(directory), "device": "cpu", "quantization": quantization}
        settings = WorkerSettings(**arguments)
        checked = model_checks.read_model(settings)
        return memory_checks.estimate_memory(settings, checked, torch.device("cpu"), 1).weights

    assert weights_of(packed, "w4a16") == weights_of(packed, "int8") > weights_of(model, "w4a16")
    assert weights_of(packed, "none") == weights_of(model, "none")


@pytest.mark.parametrize(
    ("variant", "settings", "reason"),
    [
        ("phi", {}, "QUIRE_KV_CACHE_DTYPE is int8, for which the compiled kernels cannot be used: a head's dimensions"),
        ("llama", {"block_size": 24}, "QUIRE_KV_CACHE_DTYPE is int8, which torch's kernels do not support"),
        ("llama", {"block_size": 24, "kernels": "compiled"}, "the compiled kernels cannot be used: the block size"),
        ("llama", {"kernels": "torch"}, "QUIRE_KV_CACHE_DTYPE is int8, which torch's kernels do not support"),
    ],
)
def test_keys_and_values_in_8_bits_are_refused_in_the_words_of_the_worker(
    variant: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = {"phi": narrow_phi, "llama": llama_models.VARIANTS["llama"]}[variant]()
    llama_models.save_model(tmp_path, config)
    args = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(StartupFailed) as refused:
        load_worker(tmp_path, "--device", "cpu", "--kv-cache-dtype", "int8", *args)
    finding = of_memory(tmp_path, kv_cache_dtype="int8", **settings)
    assert (finding.status, finding.problem) == (Status.WRONG, str(refused.value))
    assert finding.problem.startswith(reason)


def narrow_phi() -> Any:
    """A model that transformers' modules compute, with heads of 8 dimensions."""
    config = transformers_models.VARIANTS["phi"]()
    config.update({"num_attention_heads": 6, "num_key_value_heads": 6})
    return config


def test_several_workers_share_the_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_checks, "available_memory", lambda _=None: 100 * MIB)
    assert of_memory(model).status is Status.OK
    finding = of_memory(model, num_processes=4)
    assert (finding.status, "set QUIRE_CPU_KV_BYTES to " in finding.next_step) == (Status.WARNING, True)


def test_memory_is_not_judged_for_a_model_that_is_wrong(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert of_memory(model).status is Status.SKIPPED
