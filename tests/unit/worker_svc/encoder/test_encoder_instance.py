"""From settings to a worker that answers steps with embeddings."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification, PhiConfig

from bert_models import (
    CONTEXT,
    hidden_states,
    random_prompts,
    raw_score,
    save_bert,
    save_cross_encoder,
    save_encoder,
    save_masked_model,
)
from dense_models import BIDIRECTIONAL
from dense_modules import add_dense
from described_models import description_of
from encoder_model import WORDS, encoder_tokenizer
from llama_models import VARIANTS, save_model
from llama_models import prompts as decoder_prompts
from quantized_models import in_order, quantize, save_quantized
from quire.worker.v1 import worker_pb2 as pb
from reranker_files import write_reranker_files
from svc_common.settings import read_settings
from worker_service import new_sequence, scheduled, serving
from worker_svc.encoder.backend import quantization_of_values
from worker_svc.encoder.instance import fitting_context
from worker_svc.errors import StartupFailed
from worker_svc.load import load_model
from worker_svc.model.architecture import describe_any
from worker_svc.model.config import read_config
from worker_svc.model.decoder_states import prompt_bytes
from worker_svc.model.description import ModelDescription
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.embedding_layers import weights_of
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, PromptComputation, SamplingParams, ScheduledSequence, Step
from worker_svc.step_runner import StepInstance

EMBEDDING = pb.ResultKind(embedding=pb.EmbeddingResult())


def load(directory: Path, *args: str, report: Callable[[str], None] = print) -> StepInstance:
    threads = ["--num-threads", str(torch.get_num_threads())]
    settings = ["--model", str(directory), "--dtype", "float32", *threads, *args]
    return load_model(read_settings(WorkerSettings, settings), report)


def test_it_describes_a_model_without_kv(tmp_path: Path) -> None:
    save_bert(tmp_path, max_tokens=40)
    limits = load(tmp_path).description.limits
    assert (limits.context_length, limits.num_blocks, limits.vocab_size) == (40, 0, len(WORDS))
    assert limits.max_indivisible_tokens == 40


def test_a_model_whose_vectors_are_not_finite_is_refused(tmp_path: Path) -> None:
    save_bert(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.LayerNorm.weight"][0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupFailed, match=r"its embedding is not finite\. .* hold NaN or infinity, or QUIRE_DTYPE"):
        load(tmp_path)


def test_an_encoder_whose_context_is_no_length_is_refused_by_the_field(tmp_path: Path) -> None:
    save_encoder(tmp_path, "modernbert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**12}))
    with pytest.raises(StartupFailed, match="is 1000000000000 tokens, by max_position_embeddings "):
        load(tmp_path)


def test_its_identity_changes_with_how_vectors_are_made(tmp_path: Path) -> None:
    directories = [tmp_path / pooling for pooling in ("mean", "cls")]
    for directory in directories:
        save_bert(directory, pooling=directory.name)
    mean, cls = (load(directory).description.fingerprint for directory in directories)
    assert mean != cls


def test_a_step_holds_the_longest_prompt(tmp_path: Path) -> None:
    save_bert(tmp_path)
    limits = load(tmp_path, "--max-step-tokens", "8", "--max-sequences", "3").description.limits
    assert (limits.max_step_tokens, limits.max_sequences, limits.max_indivisible_tokens) == (8, 3, CONTEXT)
    assert load(tmp_path, "--max-model-len", "9").description.limits.context_length == 9


@pytest.mark.parametrize(("setting", "value"), [("drafter", "ngram"), ("kernels", "triton")])
def test_settings_of_decoders_have_no_effect_and_are_named(setting: str, value: str, tmp_path: Path) -> None:
    save_bert(tmp_path)
    lines: list[str] = []
    load(tmp_path, f"--{setting}", value, report=lines.append)
    assert f"QUIRE_{setting.upper()} has no effect on an encoder" in lines


@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
def test_a_model_that_embeds_has_the_weights_that_the_settings_say(architecture: str, tmp_path: Path) -> None:
    if architecture == "bert":
        save_bert(tmp_path, num_attention_heads=3)
        prompts = random_prompts([17])
    else:
        save_model(tmp_path, VARIANTS[architecture]())
        prompts = decoder_prompts(17)
    lines: list[str] = []
    plain = load(tmp_path, "--task", "embed")
    in_8_bits = load(tmp_path, "--task", "embed", "--quantization", "w8a8", report=lines.append)
    assert not [line for line in lines if "QUIRE_QUANTIZATION" in line]
    assert plain.description.fingerprint != in_8_bits.description.fingerprint
    (expected,), (vector,) = embedded(plain, prompts), embedded(in_8_bits, prompts)
    assert vector != expected
    assert vector == pytest.approx(expected, abs=0.05)


# Heads of 16 dimensions, which the compiled kernels support; those of 12 are computed by torch.
HEADS = {"compiled": 3, "torch": 4}


@pytest.fixture(params=HEADS)
def kernels(request: pytest.FixtureRequest) -> str:
    """Which kernels compute the model."""
    return str(request.param)


@pytest.mark.parametrize("task", ["embed", "generate"])
def test_a_format_of_weights_that_a_processor_does_not_compute_is_refused_by_name(task: str, tmp_path: Path) -> None:
    """Of a checkpoint whose codes would be kept, before its size is judged."""
    directory = tmp_path / "dense"
    directory.mkdir()
    save_model(directory, VARIANTS["qwen3"]())

    def stored(layer: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if layer == "lm_head" or weight.shape[0] % 8 or weight.shape[1] % 8:
            return None
        codes = quantize(weight, 4, in_order(weight.shape[1], -1), sym=True)
        return codes.gptq(layer), codes.dense()

    config = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=config)
    with pytest.raises(StartupFailed, match="QUIRE_QUANTIZATION is fp8, which is for a GPU"):
        load(packed, "--task", task, "--device", "cpu", "--quantization", "fp8")


def test_the_compiled_kernels_compute_what_they_support(tmp_path: Path) -> None:
    lines: list[str] = []
    for kernels, num_heads in HEADS.items():
        save_bert(tmp_path / kernels, num_attention_heads=num_heads)
        load(tmp_path / kernels, "--kernels", "auto", report=lines.append)
        load(tmp_path / kernels, "--kernels", "torch", report=lines.append)
    load(tmp_path / "compiled", "--kernels", "compiled")
    (line,) = [line for line in lines if "torch computes the model" in line]
    assert "multiple of 16, not 12" in line
    with pytest.raises(StartupFailed, match="multiple of 16, not 12"):
        load(tmp_path / "torch", "--kernels", "compiled")


def test_a_limit_of_longer_models_has_no_effect(tmp_path: Path) -> None:
    save_bert(tmp_path)
    assert load(tmp_path, "--max-model-len", str(CONTEXT + 1)).description.limits.context_length == CONTEXT


def test_in_deterministic_mode_vectors_do_not_depend_on_the_step(kernels: str, tmp_path: Path) -> None:
    save_bert(tmp_path, num_attention_heads=HEADS[kernels])
    prompts = random_prompts([5, 17, 17, CONTEXT])
    runner = load(tmp_path, "--deterministic", "true").runner

    def values(ids: list[int]) -> list[Sequence[float]]:
        new = [
            NewSequence(id_, prompts[id_], len(prompts[id_]), 0, SamplingParams(), result="embedding") for id_ in ids
        ]
        step = Step([], new, [ScheduledSequence(id_, 0, len(prompts[id_]), []) for id_ in ids])
        found = [result.value for result in runner.finish(runner.launch(step)).sequences]
        runner.reset()
        return found

    together = values([0, 1, 2, 3])
    assert together == [values([id_])[0] for id_ in range(4)]
    assert load(tmp_path).description.fingerprint != load(tmp_path, "--deterministic", "true").description.fingerprint


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    save_bert(tmp_path / "model")
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = encoder_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(StartupFailed, match="QUIRE_TOKENIZER"):
        load(tmp_path / "model", "--tokenizer", str(other))


def test_a_checkpoint_with_other_parts_is_refused(tmp_path: Path) -> None:
    save_bert(tmp_path, num_hidden_layers=4)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 3'))
    with pytest.raises(StartupFailed, match=r"encoder\.layer\.3"):
        load(tmp_path)


async def test_steps_over_the_wire(kernels: str, tmp_path: Path) -> None:
    model = save_bert(tmp_path, num_attention_heads=HEADS[kernels])
    prompts = random_prompts([3, 17])
    cls = pb.EmbeddingResult(pooling=pb.POOLING_CLS, num_dimensions=5, normalization=pb.NORMALIZATION_NONE)
    async with serving() as worker:
        worker.service.serve(load(tmp_path))
        [computed] = (await worker.stub.Describe(pb.DescribeRequest())).computed_results
        assert computed.result.WhichOneof("kind") == "embedding"
        assert computed.computation == pb.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV
        stream = await worker.open()
        new = [
            new_sequence(1, prompts[0], result=EMBEDDING),
            new_sequence(2, prompts[1], result=pb.ResultKind(embedding=cls)),
            new_sequence(3, prompts[0]),
        ]
        await stream.send(1, new_sequences=new, scheduled=scheduled((3, 0, 3), (1, 0, 3), (2, 0, 17)))
        result = (await stream.receive()).result
    assert [(one.schedule_index, one.message) for one in result.failures] == [
        (0, "this model computes embedding, and not tokens")
    ]
    assert [value.schedule_index for value in result.values] == [1, 2]
    mean = torch.nn.functional.normalize(hidden_states(model, prompts[0]).mean(0), dim=0)
    assert list(result.values[0].value.numbers) == pytest.approx(mean.tolist(), abs=1e-4)
    first = hidden_states(model, prompts[1])[0][:5]
    assert list(result.values[1].value.numbers) == pytest.approx(first.tolist(), abs=1e-4)


async def test_scores_over_the_wire(kernels: str, tmp_path: Path) -> None:
    model = save_cross_encoder(tmp_path, num_attention_heads=HEADS[kernels])
    prompts = random_prompts([3, 17, CONTEXT])
    raw = pb.ResultKind(score=pb.ScoreResult(num_first_tokens=9, is_raw=True))
    async with serving() as worker:
        worker.service.serve(load(tmp_path))
        [computed] = (await worker.stub.Describe(pb.DescribeRequest())).computed_results
        assert computed.result.WhichOneof("kind") == "score"
        assert computed.computation == pb.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV
        stream = await worker.open()
        new = [
            new_sequence(1, prompts[0], result=pb.ResultKind(score=pb.ScoreResult())),
            new_sequence(2, prompts[1], result=raw),
            new_sequence(3, prompts[2], result=EMBEDDING),
        ]
        await stream.send(1, new_sequences=new, scheduled=scheduled((3, 0, CONTEXT), (1, 0, 3), (2, 0, 17)))
        result = (await stream.receive()).result
    failures = [(one.schedule_index, one.message) for one in result.failures]
    assert failures == [(0, "this model computes score, and not embedding")]
    first, second = (list(value.value.numbers) for value in result.values)
    # AMX rounds the factors of products of float32.
    tolerance = 1e-5 if kernels == "torch" else 1e-3
    assert first == pytest.approx([torch.tensor(raw_score(model, prompts[0])).sigmoid().item()], abs=tolerance)
    assert second == pytest.approx([raw_score(model, prompts[1], 9)], abs=tolerance)


def as_sentence_transformer(directory: Path, pooling: str, *, normalizes: bool) -> None:
    """Adds the files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [{"path": f"1_{kind}", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({pooling: True}))


def embedded(instance: StepInstance, prompts: list[list[int]]) -> list[Sequence[float]]:
    """The embeddings of prompts, in one step."""
    new = [
        NewSequence(id_, prompt, len(prompt), 0, SamplingParams(), result="embedding")
        for id_, prompt in enumerate(prompts)
    ]
    step = Step([], new, [ScheduledSequence(id_, 0, len(prompt), []) for id_, prompt in enumerate(prompts)])
    return [result.value for result in instance.runner.finish(instance.runner.launch(step)).sequences]


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("architecture", ["distilbert", "mpnet", "modernbert", "nomic_bert"])
def test_each_form_of_encoder_embeds(architecture: str, quantization: str, tmp_path: Path) -> None:
    """Without files of sentence-transformers: means, which are not normalised."""
    model, prompts = save_encoder(tmp_path, architecture), random_prompts([1, 16, 17, CONTEXT])
    for prompt, vector in zip(
        prompts, embedded(load(tmp_path, f"--quantization={quantization}"), prompts), strict=True
    ):
        expected = hidden_states(model, prompt).mean(0)
        if quantization == "none":
            assert vector == pytest.approx(expected.tolist(), abs=1e-3)
        else:
            assert torch.cosine_similarity(torch.tensor(vector), expected, dim=0) > 0.98


@pytest.mark.parametrize(("device", "expected"), [("cpu", "w8a8"), ("cuda", "none")])
@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_encoders_are_quantized_on_a_cpu_alone(architecture: str, device: str, expected: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, architecture)
    description, settings = describe_any(read_config(tmp_path)), read_settings(WorkerSettings, ["--quantization=w8a8"])
    assert description is not None
    assert quantization_of_values(settings, description, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("variant", "pooling", "normalizes"),
    [("qwen3", "pooling_mode_lasttoken", True), ("llama", "pooling_mode_mean_tokens", False), ("mistral", None, True)],
)
def test_a_decoder_embeds(variant: str, pooling: str | None, normalizes: bool, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    if pooling is not None:
        as_sentence_transformer(tmp_path, pooling, normalizes=normalizes)
    # Without files an operator chooses it, and vectors are as vLLM makes them.
    instance = load(tmp_path, *(["--task", "embed"] if pooling is None else []))
    description = instance.description
    assert description.results == {"embedding": PromptComputation.INDIVISIBLE_WITHOUT_KV}
    assert (description.limits.num_blocks, description.limits.context_length) == (0, 256)
    model: Any = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = decoder_prompts(1, 16, 17, 63, 111)
    for prompt, vector in zip(prompts, embedded(instance, prompts), strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        expected = states.mean(0) if pooling == "pooling_mode_mean_tokens" else states[-1]
        expected = torch.nn.functional.normalize(expected, dim=0) if normalizes else expected
        assert vector == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_decoder_in_both_directions_embeds_with_layers_behind_its_pooling(kernels: str, tmp_path: Path) -> None:
    """As EmbeddingGemma, alone and in a crowd."""
    config = BIDIRECTIONAL["gemma3 in both directions"]()
    save_model(tmp_path, config)
    as_sentence_transformer(tmp_path, "pooling_mode_mean_tokens", normalizes=False)
    add_dense(tmp_path, config.hidden_size, 80, bias=False, activation="torch.nn.modules.linear.Identity")
    add_dense(tmp_path, 80, 24, bias=False, activation="torch.nn.modules.linear.Identity")
    instance = load(tmp_path, "--kernels", kernels)
    files = [weights_of(layer, tmp_path) for layer in embedding_defaults(tmp_path).layers]
    weights = [load_file(file)["linear.weight"] for file in files]
    model: Any = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    prompts = decoder_prompts(1, 16, 17, 63, 111)
    for prompt, vector in zip(prompts, embedded(instance, prompts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].mean(0)
            for weight in weights:
                expected = weight @ expected
        assert vector == pytest.approx(expected.tolist(), abs=1e-3)
        assert embedded(instance, [prompt]) == [pytest.approx(vector, abs=1e-4)]
    save_file({"linear.weight": -weights[1]}, files[1])
    assert load(tmp_path, "--kernels", kernels).description.fingerprint != instance.description.fingerprint
    with pytest.raises(StartupFailed, match="QUIRE_TASK is generate, but this gemma3_text model computes embeddings"):
        load(tmp_path, "--task", "generate")


def test_a_decoder_generates_if_the_operator_says_so(tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS["qwen3"]())
    as_sentence_transformer(tmp_path, "pooling_mode_lasttoken", normalizes=True)
    chosen = ["--task", "generate", "--num-blocks", "8", "--kernels", "torch"]
    assert "tokens" in load(tmp_path, *chosen).description.results


def test_scores_of_other_tokens_have_another_fingerprint(tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS["qwen3"]())
    found = set()
    for tokens in ((5, 9), (5, None), (9, 5), (5, 9)):
        write_reranker_files(tmp_path, *tokens)
        description = load(tmp_path).description
        assert description.results.keys() == {"score"}
        found.add(description.fingerprint)
    assert len(found) == 3


def test_what_a_model_does_not_compute_is_refused(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert")
    save_bert(tmp_path / "logits")
    write_reranker_files(tmp_path / "logits", 5, 9)
    save_encoder(tmp_path / "modern", "modernbert")
    write_reranker_files(tmp_path / "modern", 5, 9)
    save_masked_model(tmp_path / "masked", "roberta")
    save_cross_encoder(tmp_path / "cross-encoder")
    save_cross_encoder(tmp_path / "classifier", num_labels=3)
    scoring = VARIANTS["qwen3"]()
    scoring.num_labels = 1
    save_model(tmp_path / "decoder", scoring, AutoModelForSequenceClassification)
    (tmp_path / "other").mkdir()
    PhiConfig(architectures=["PhiForCausalLM"], qk_layernorm=True).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    (tmp_path / "other" / "model.safetensors").touch()
    for model, task, text in (
        ("bert", "generate", "this bert model computes embeddings"),
        ("logits", "auto", "not one whose scores of pairs of texts are computed"),
        ("modern", "auto", "not one whose scores of pairs of texts are computed"),
        (
            "masked",
            "auto",
            "each sees later ones, and its files do not say that it embeds; QUIRE_TASK=embed",
        ),
        ("cross-encoder", "generate", "computes scores of pairs of texts"),
        ("cross-encoder", "embed", "computes scores of pairs of texts"),
        ("classifier", "generate", "computes numbers of labels"),
        ("decoder", "generate", "this qwen3 model computes scores of pairs of texts"),
        ("decoder", "embed", "this qwen3 model computes scores of pairs of texts"),
        (
            "other",
            "embed",
            "not one whose embeddings are computed: docs/design/models.md has the architectures",
        ),
        ("other", "pooling", "not one whose embeddings are computed"),
    ):
        with pytest.raises(StartupFailed, match=text):
            load(tmp_path / model, "--task", task)
    for model, task, result in (
        ("bert", "embed", "embedding"),
        ("bert", "pooling", "embedding"),
        ("masked", "embed", "embedding"),
        ("cross-encoder", "pooling", "score"),
        ("classifier", "pooling", "score"),
        ("classifier", "auto", "score"),
        ("decoder", "pooling", "score"),
        ("decoder", "auto", "score"),
    ):
        assert load(tmp_path / model, "--task", task).description.results.keys() == {result}


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_the_context_of_a_decoder_that_embeds_fits_in_memory(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    description = description_of(tmp_path, ModelDescription)
    reported: list[str] = []
    estimate = partial(prompt_bytes, description, dtype=torch.float32)

    def fitting(free: int) -> int:
        return fitting_context(estimate, 65_536, 1_024, free, reported.append)

    needed = 4 * prompt_bytes(description, 65_536, torch.float32)
    assert (fitting(needed), reported) == (65_536, [])
    assert fitting(needed - 4) == 32_768
    assert "QUIRE_MAX_MODEL_LEN allows more" in reported[0]
    assert fitting(0) == 1_024
