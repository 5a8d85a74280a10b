"""Describes the heads of models that score pairs of texts."""

from dataclasses import replace
from typing import Any

from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import ModelDescription
from worker_svc.model.score_head_description import ScoreActivation, ScoreHeadSpec

_ACTIVATIONS = {"Identity": ScoreActivation.NONE, "Sigmoid": ScoreActivation.SIGMOID}
# As transformers calls it in every decoder with a head for sequences.
_OF_DECODERS = "score"


def has_score_head(config: Any) -> bool:
    """Whether a config names a class with a head for sequences."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def describe_score_head(config: Any, output: str, dense: str | None = None) -> ScoreHeadSpec:
    """The head of an encoder, whose layers have biases.

    Raises UnsupportedModel if it has several labels, or another activation than these can have.
    """
    if config.num_labels != 1:
        raise UnsupportedModel(
            f"this {config.model_type} model has a head of {config.num_labels} labels; only cross-encoders, which have "
            "one, are supported"
        )
    return ScoreHeadSpec(output, _activation(config), dense)


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
    """As sentence-transformers chooses it for one label: what config.json names, otherwise a sigmoid."""
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is None:
        # As vLLM: transformers trains such a model with the mean squared error of its output.
        is_regression = getattr(config, "problem_type", None) == "regression"
        return ScoreActivation.NONE if is_regression else ScoreActivation.SIGMOID
    return named_activation(named, "config.json")


def named_activation(named: object, file: str) -> ScoreActivation:
    """The activation function that a file names. Raises UnsupportedModel for another one than these can be."""
    package, _, name = str(named).rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{file} names the activation function {named} of a cross-encoder; only torch.nn.Identity and "
            "torch.nn.Sigmoid are supported"
        )
    return _ACTIVATIONS[name]
