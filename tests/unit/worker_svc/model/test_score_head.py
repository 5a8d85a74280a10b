"""Scores of cross-encoders, and the numbers of labels of other heads, are those of transformers, with the activation
that config.json names.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

import compiled
import latent_models
import llama_models
import transformers_models
from bert_models import (
    CONTEXT,
    ENCODERS,
    random_prompts,
    raw_score,
    save_bert,
    save_classifier,
    save_cross_encoder,
)
from described_models import description_of
from llama_models import SIZES, hidden_states, save_model
from llama_models import prompts as decoder_prompts
from reranker_files import write_reranker_files
from svc_common.model_tasks import ModelTask, task_of
from worker_svc.compressed_writer import scheme_named
from worker_svc.encoder.pooling import ScorePooler
from worker_svc.errors import UnsupportedModel
from worker_svc.model.compiled_states import load_compiled_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.description_cache import any_description_of
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.score_files import with_score_files
from worker_svc.model.score_head import load_score_head
from worker_svc.model.score_head_description import ScoreActivation
from worker_svc.model.torch_encoder import load_torch_encoder
from worker_svc.quantize import quantize_model
from worker_svc.step import NewSequence, SamplingParams, ScoreParams

CPU = torch.device("cpu")
# What they read, and the head's place, is the same for all of them.
DECODERS: dict[str, Callable[[], Any]] = {
    **{name: llama_models.VARIANTS[name] for name in ("llama", "llama-tied-biased", "qwen3")},
    **{
        name: transformers_models.VARIANTS[name]
        for name in ("gemma2", "gemma3", "phi3", "gpt2", "gpt-neox", "opt", "mixtral", "qwen2-moe", "gpt-oss")
    },
    "deepseek-v2-lite": latent_models.VARIANTS["deepseek-v2-lite"],
}
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
SOFTMAX = "torch.nn.modules.activation.Softmax"


def activation_of(directory: Path) -> ScoreActivation:
    head = description_of(directory, EncoderDescription).score_head
    assert head is not None
    return head.activation


@torch.inference_mode()
def check_scores(directory: Path, model: PreTrainedModel, dtype: torch.dtype, tolerance: float) -> None:
    """Pairs of many lengths, raw and with the sigmoid, alone and in a crowd."""
    description = description_of(directory, EncoderDescription)
    encoder = load_torch_encoder(description, directory, dtype, CPU)
    head = load_score_head(description, directory, CPU)
    assert head is not None
    pooler = ScorePooler(head)
    lengths = [2, 3, 15, 16, 17, 33, CONTEXT - 1, CONTEXT] * 3
    prompts = random_prompts(lengths)
    new = [
        NewSequence(
            number, prompt, len(prompt), 0, SamplingParams(),
            score=ScoreParams(1 + number % (len(prompt) - 1), is_raw=number % 2 == 0),
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    expected = [torch.tensor(raw_score(model, one.token_ids, one.score.num_first_tokens)) for one in new]
    scores = [float(one if given.score.is_raw else one.sigmoid()) for one, given in zip(expected, new, strict=True)]
    assert max(scores) - min(scores) > 0.1
    for size in (1, 5, len(new)):
        found = []
        for start in range(0, len(new), size):
            some = new[start : start + size]
            num_first, places = [one.score.num_first_tokens for one in some], list(map(pooler.place, some))
            hidden = encoder([one.token_ids for one in some], num_first, places)
            found += [score for (score,) in pooler(hidden, some)]
        assert found == pytest.approx(scores, abs=tolerance)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_scores_of_encoders(architecture: str, tmp_path: Path) -> None:
    check_scores(tmp_path, save_classifier(tmp_path, architecture), torch.float32, 1e-5)


def test_scores_in_bfloat16_are_near(tmp_path: Path) -> None:
    check_scores(tmp_path, save_cross_encoder(tmp_path), torch.bfloat16, 0.3)


def save_decoder_with_head(variant: str, directory: Path, **config: Any) -> None:
    """A random decoder with a head of one label, which other options of its config may change."""
    whole = DECODERS[variant]()
    whole.update({"num_labels": 1, **config})
    save_model(directory, whole, AutoModelForSequenceClassification)


@pytest.mark.parametrize("variant", DECODERS)
@torch.inference_mode()
def test_scores_of_decoders(variant: str, tmp_path: Path) -> None:
    save_decoder_with_head(variant, tmp_path)
    description = description_of(tmp_path, ModelDescription)
    states = load_compiled_states(description, tmp_path, torch.float32, compiled.thread_pool())
    head = load_score_head(description, tmp_path, CPU)
    assert head is not None
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    crowd = decoder_prompts(1, 2, 16, 17, 63)
    expected = [float(model(torch.tensor([prompt]), use_cache=False).logits) for prompt in crowd]
    assert max(expected) - min(expected) > 0.1
    outputs = head.outputs(torch.cat(states(crowd, places=list(map(head.place, crowd)))))
    assert outputs[:, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert head.activate(outputs).tolist() == outputs.sigmoid().tolist()


@pytest.mark.parametrize("architecture", ENCODERS)
@torch.inference_mode()
def test_numbers_of_labels_of_encoders(architecture: str, tmp_path: Path) -> None:
    """Alone and in a crowd, raw and with the softmax."""
    model: Any = save_classifier(tmp_path, architecture, num_labels=3)
    description = description_of(tmp_path, EncoderDescription)
    encoder = load_torch_encoder(description, tmp_path, torch.float32, CPU)
    head = load_score_head(description, tmp_path, CPU)
    assert head is not None
    pooler = ScorePooler(head)
    new = [
        NewSequence(number, prompt, len(prompt), 0, SamplingParams(), score=ScoreParams(is_raw=number % 2 == 0))
        for number, prompt in enumerate(random_prompts([2, 3, 15, 16, 17, CONTEXT]))
    ]
    logits = [model(torch.tensor([one.token_ids])).logits[0] for one in new]
    expected = [
        (one if given.score.is_raw else one.softmax(0)).tolist() for one, given in zip(logits, new, strict=True)
    ]
    for size in (1, len(new)):
        found: list[list[float]] = []
        for start in range(0, len(new), size):
            some = new[start : start + size]
            hidden = encoder(
                [one.token_ids for one in some], [len(one.token_ids) for one in some], list(map(pooler.place, some))
            )
            found += pooler(hidden, some)
        assert found == [pytest.approx(one, abs=1e-5) for one in expected]


@pytest.mark.parametrize("variant", DECODERS)
@torch.inference_mode()
def test_numbers_of_labels_of_decoders(variant: str, tmp_path: Path) -> None:
    save_decoder_with_head(variant, tmp_path, num_labels=4, problem_type="multi_label_classification")
    description = description_of(tmp_path, ModelDescription)
    states = load_compiled_states(description, tmp_path, torch.float32, compiled.thread_pool())
    head = load_score_head(description, tmp_path, CPU)
    assert head is not None
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    crowd = decoder_prompts(1, 2, 16, 17, 63)
    expected = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in crowd]
    outputs = head.outputs(torch.cat(states(crowd, places=list(map(head.place, crowd)))))
    torch.testing.assert_close(outputs, torch.stack(expected), rtol=0, atol=1e-3)
    assert torch.equal(head.activate(outputs), outputs.sigmoid())


@torch.inference_mode()
def test_padding_at_the_end_of_a_prompt_is_passed_over(tmp_path: Path) -> None:
    """As where a tokenizer adds that token behind each text."""
    save_decoder_with_head("qwen3", tmp_path, pad_token_id=7)
    head = load_score_head(description_of(tmp_path, ModelDescription), tmp_path, CPU)
    assert head is not None
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for prompt in ([5, 9, 3], [5, 9, 7], [5, 7, 7, 7], [7, 7], [7, 5]):
        expected = float(model(torch.tensor([prompt]), use_cache=False).logits)
        state = hidden_states(tmp_path, prompt)[head.place(prompt)]
        assert head.outputs(state[None])[0].tolist() == pytest.approx([expected], abs=1e-3)


@torch.inference_mode()
def test_a_head_in_the_format_of_the_other_layers(tmp_path: Path) -> None:
    """compressed-tensors stores it so unless its config leaves it out."""
    save_decoder_with_head("qwen3", tmp_path / "dense")
    quantize_model(tmp_path / "dense", tmp_path / "coded", scheme_named("w8a8", 128), print)
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["score"]
    tensors = load_file(tmp_path / "coded" / "model.safetensors")
    weight = tensors.pop("score.weight")
    scale = weight.abs().amax() / 127
    tensors["score.weight"] = (weight / scale).round().to(torch.int8)
    tensors["score.weight_scale"] = scale.reshape(1, 1)
    config["quantization_config"]["ignore"] = []
    save_file(tensors, tmp_path / "coded" / "model.safetensors")
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config))
    states = torch.randn(5, weight.shape[1])
    outputs = []
    for directory in (tmp_path / "dense", tmp_path / "coded"):
        head = load_score_head(description_of(directory, ModelDescription), directory, CPU)
        assert head is not None
        outputs.append(head.outputs(states))
    dense, coded = outputs
    assert (coded - dense).norm() < 0.02 * dense.norm()
    assert not torch.equal(coded, dense)


@pytest.mark.parametrize("tokens", [(5, 9), (7, None)])
@pytest.mark.parametrize("variant", DECODERS)
@torch.inference_mode()
def test_scores_of_logits(variant: str, tokens: tuple[int, int | None], tmp_path: Path) -> None:
    """Also of tied heads, and of such with biases or soft caps."""
    save_model(tmp_path, DECODERS[variant]())
    write_reranker_files(tmp_path, *tokens)
    description = with_score_files(any_description_of(tmp_path), tmp_path, task_of(tmp_path))
    assert isinstance(description, ModelDescription)
    states = load_compiled_states(description, tmp_path, torch.float32, compiled.thread_pool())
    head = load_score_head(description, tmp_path, CPU)
    assert head is not None
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    crowd = decoder_prompts(1, 2, 16, 17, 63)
    logits = [model(torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in crowd]
    expected = [float(one[tokens[0]] - (0 if tokens[1] is None else one[tokens[1]])) for one in logits]
    assert max(expected) - min(expected) > 0.1
    outputs = head.outputs(torch.cat(states(crowd, places=list(map(head.place, crowd)))))
    assert outputs[:, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert head.activate(outputs).tolist() == outputs.sigmoid().tolist()


@torch.inference_mode()
def test_scores_of_logits_of_a_head_that_the_config_ties_and_that_is_another(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=True))
    write_reranker_files(tmp_path, 5, 9)
    path, weight = tmp_path / "model.safetensors", torch.randn(SIZES["vocab_size"], SIZES["hidden_size"])
    save_file(load_file(path) | {"lm_head.weight": weight}, path, metadata={"format": "pt"})
    description = with_score_files(any_description_of(tmp_path), tmp_path, task_of(tmp_path))
    assert isinstance(description, ModelDescription)
    assert description.tied_embeddings
    head = load_score_head(description, tmp_path, CPU)
    assert head is not None
    states = torch.randn(3, SIZES["hidden_size"])
    torch.testing.assert_close(head.outputs(states)[:, 0], states @ (weight[5] - weight[9]), rtol=0, atol=1e-4)


def test_a_model_that_may_score_generates_or_embeds_where_the_settings_say(tmp_path: Path) -> None:
    save_model(tmp_path, DECODERS["qwen3"]())
    write_reranker_files(tmp_path, 5, 9)
    description = any_description_of(tmp_path)
    assert with_score_files(description, tmp_path, ModelTask.GENERATE) == description
    assert with_score_files(description, tmp_path, ModelTask.EMBED) == description


@pytest.mark.parametrize("tokens", [(None, 5), (10_000, 5), (5, -1), ("yes", 5)])
def test_tokens_that_the_vocabulary_has_not_are_refused(tokens: tuple[Any, Any], tmp_path: Path) -> None:
    save_model(tmp_path, DECODERS["qwen3"]())
    write_reranker_files(tmp_path, *tokens)
    with pytest.raises(UnsupportedModel, match="it must be a token"):
        with_score_files(any_description_of(tmp_path), tmp_path, task_of(tmp_path))


def test_the_activation_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As later versions of sentence-transformers write it, of any cross-encoder."""
    save_cross_encoder(tmp_path, sentence_transformers={"activation_fn": SIGMOID})
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text(json.dumps({"activation_fn": IDENTITY}))
    description = with_score_files(any_description_of(tmp_path), tmp_path, task_of(tmp_path))
    assert description is not None
    assert description.score_head is not None
    assert description.score_head.activation is ScoreActivation.NONE
    path.write_text(json.dumps({"activation_fn": "torch.nn.modules.activation.Tanh"}))
    with pytest.raises(UnsupportedModel, match="Tanh"):
        with_score_files(any_description_of(tmp_path), tmp_path, task_of(tmp_path))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "Tanh"),
    ],
)
def test_other_heads_of_decoders_are_refused_by_name(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    save_decoder_with_head("qwen3", tmp_path, **config)
    with pytest.raises(UnsupportedModel, match=named):
        any_description_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ScoreActivation.SIGMOID),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, ScoreActivation.NONE),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, ScoreActivation.SIGMOID),
        ({"sentence_transformers": {"version": "4.0.1"}}, ScoreActivation.SIGMOID),
        ({"sbert_ce_default_activation_function": IDENTITY}, ScoreActivation.NONE),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, ScoreActivation.SIGMOID),
        ({"problem_type": "regression"}, ScoreActivation.NONE),
        ({"num_labels": 3}, ScoreActivation.SOFTMAX),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, ScoreActivation.SOFTMAX),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, ScoreActivation.SIGMOID),
        ({"num_labels": 3, "problem_type": "regression"}, ScoreActivation.NONE),
        ({"num_labels": 3, "sentence_transformers": {"activation_fn": IDENTITY}}, ScoreActivation.NONE),
        ({"num_labels": 3, "sentence_transformers": {"activation_fn": SOFTMAX}}, ScoreActivation.SOFTMAX),
    ],
)
def test_the_activation_is_that_of_the_config(
    config: dict[str, Any], expected: ScoreActivation, tmp_path: Path
) -> None:
    save_cross_encoder(tmp_path, **config)
    assert activation_of(tmp_path) is expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"sentence_transformers": {"activation_fn": SOFTMAX}}, "always 1"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "Tanh"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "os.system"),
        ({"sbert_ce_default_activation_function": "Identity"}, "Identity"),
    ],
)
def test_other_heads_are_refused_by_name(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    save_cross_encoder(tmp_path, **config)
    with pytest.raises(UnsupportedModel, match=named):
        any_description_of(tmp_path)


def test_a_head_without_labels_is_refused(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {}, "label2id": {}}))
    with pytest.raises(UnsupportedModel, match="a head without labels"):
        any_description_of(tmp_path)


def test_a_model_without_a_head_has_none(tmp_path: Path) -> None:
    save_bert(tmp_path)
    assert load_score_head(description_of(tmp_path, EncoderDescription), tmp_path, CPU) is None
