"""Describes the heads of models that score pairs of texts, or classify texts."""

from dataclasses import replace
from typing import Any

from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import ModelDescription
from worker_svc.model.score_head_description import DenseActivation, ScoreActivation, ScoreHeadSpec

_ACTIVATIONS = {
    "Identity": ScoreActivation.NONE,
    "Sigmoid": ScoreActivation.SIGMOID,
    "Softmax": ScoreActivation.SOFTMAX,
}
# As transformers calls it in every decoder with a head for sequences.
_OF_DECODERS = "score"


def has_score_head(config: Any) -> bool:
    """Whether a config names a class with a head for sequences."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def describe_score_head(
    config: Any, output: str, dense: str | None = None, dense_activation: DenseActivation = DenseActivation.TANH
) -> ScoreHeadSpec:
    """The head of an encoder, whose layers have biases.

    Raises UnsupportedModel if it has no labels, or another activation than these can have.
    """
    if not config.num_labels:
        raise UnsupportedModel(f"this {config.model_type} model has a head without labels")
    return ScoreHeadSpec(output, _activation(config), config.num_labels, dense, dense_activation)


def with_score_head(description: ModelDescription, config: Any) -> ModelDescription:
    """A decoder with the head that its config names, in place of the one for logits; the same one if it has a head
    already, or its config names none. Raises UnsupportedModel as `describe_score_head` does.
    """
    if description.score_head is not None or not has_score_head(config):
        return description
    head = replace(
        describe_score_head(config, _OF_DECODERS), bias=False, of_last_token=True, passed_over=config.pad_token_id
    )
    # The layers do not use it; `score_head.py` reads it.
    return replace(description, score_head=head, unused_prefixes=(*description.unused_prefixes, f"{_OF_DECODERS}."))


def _activation(config: Any) -> ScoreActivation:
    """What config.json names as sentence-transformers does; otherwise as transformers' pipelines choose it."""
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is not None:
        return named_activation(named, "config.json", config.num_labels)
    problem = getattr(config, "problem_type", None)
    if problem == "regression":  # trained with the mean squared error of its output
        return ScoreActivation.NONE
    if problem == "multi_label_classification" or config.num_labels == 1:
        return ScoreActivation.SIGMOID
    return ScoreActivation.SOFTMAX


def named_activation(named: object, file: str, num_labels: int) -> ScoreActivation:
    """The activation function that a file names. Raises UnsupportedModel for another one than these can be."""
    package, _, name = str(named).rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{file} names the activation function {named} of the model's head; only torch.nn.Identity, "
            "torch.nn.Sigmoid and, of several labels, torch.nn.Softmax are supported"
        )
    activation = _ACTIVATIONS[name]
    if activation is ScoreActivation.SOFTMAX and num_labels == 1:
        raise UnsupportedModel(f"{file} names {named}, which is always 1 for a head of one label, as this model has")
    return activation
