"""How a model scores pairs of texts or classifies texts, by the files that sentence-transformers writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from svc_common.model_tasks import ModelTask
from svc_common.models import module_kind, read_json, read_modules
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import AnyDescription, is_decoder
from worker_svc.model.describe_score_head import named_activation
from worker_svc.model.description import ModelDescription
from worker_svc.model.score_head_description import ScoreActivation, ScoreHeadSpec
from worker_svc.model.sentence_files import module_config


def with_score_files(description: AnyDescription | None, directory: Path, task: ModelTask) -> AnyDescription | None:
    """The description of the model in a directory with the head that its files say; the same one if it has no such
    head, or is not to score or classify.

    A decoder may answer with a token, whose logit is the score (https://sbert.net/docs/package_reference/cross_encoder/modules.html).

    Raises UnsupportedModel where they name what is not computed here.
    """
    if description is None or task not in (ModelTask.SCORE, ModelTask.CLASSIFY):
        return description
    head = description.score_head
    if head is None and is_decoder(description):
        head = _head_of_logits(description, directory)
    if head is None:
        return description
    config: dict[str, Any] = read_json(directory / "config_sentence_transformers.json", {})
    named = config.get("activation_fn")
    if named is not None:
        head = replace(head, activation=named_activation(named, "config_sentence_transformers.json", head.num_labels))
    return replace(description, score_head=head)


def _head_of_logits(description: ModelDescription, directory: Path) -> ScoreHeadSpec | None:
    modules = [module for module in read_modules(directory) if module_kind(module) == "LogitScore"]
    if not modules:
        return None
    config = module_config(directory, modules[0])
    tokens: list[int] = []
    for name in ("true_token_id", "false_token_id"):
        token = config.get(name)
        if token is None and name == "false_token_id":
            continue
        if not isinstance(token, int) or not 0 <= token < description.vocab_size:
            raise UnsupportedModel(
                f"the LogitScore of the model in {directory} has {name} {token}; it must be a token, from 0 to "
                f"{description.vocab_size - 1}"
            )
        tokens.append(token)
    head = description.head.stored[0]
    return ScoreHeadSpec(head.name, ScoreActivation.SIGMOID, bias=head.bias, of_last_token=True, tokens=tuple(tokens))
