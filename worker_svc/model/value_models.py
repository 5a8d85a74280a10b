"""Which models compute values of prompts, instead of tokens: encoders, and decoders that embed, score or classify."""

from pathlib import Path

from svc_common.model_tasks import ModelTask, task_of
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import AnyDescription
from worker_svc.model.description import ModelDescription
from worker_svc.model.score_files import with_score_files
from worker_svc.model.score_head_description import ScoreHeadSpec

_VALUES = {
    ModelTask.EMBED: "embeddings",
    ModelTask.SCORE: "scores of pairs of texts",
    ModelTask.CLASSIFY: "numbers of labels",
}


def for_task(description: AnyDescription | None, directory: Path, chosen: str) -> tuple[AnyDescription | None, bool]:
    """The description of the model in a directory for its task, and whether it computes values.

    `chosen` is QUIRE_TASK. If the model scores or classifies, the description has the head that its files say.

    Raises UnsupportedModel if it does not compute what is chosen, and DamagedModelFile as `task_of` does.
    """
    task = task_of(directory, chosen)
    described = with_score_files(description, directory, task)
    if described is None or _may_generate(described):
        if task is ModelTask.GENERATE:
            return described, False
        if described is None or task is not ModelTask.EMBED:
            raise _not_computed(task, directory)
        return described, True
    computed = _task_of_values(described.score_head)
    if chosen == "generate" or (chosen == "embed" and computed is not ModelTask.EMBED):
        text = f"QUIRE_TASK is {chosen}, but this {described.architecture} model computes {_VALUES[computed]}"
        raise UnsupportedModel(text)
    if computed is ModelTask.EMBED and task is ModelTask.GENERATE:  # by its class
        raise UnsupportedModel(
            f"the {described.architecture} model in {directory} generates no tokens, since each sees later ones, and "
            "its files do not say that it embeds; QUIRE_TASK=embed makes it compute embeddings"
        )
    if computed is ModelTask.EMBED and task is not ModelTask.EMBED:
        raise _not_computed(task, directory)
    return described, True


def _may_generate(description: AnyDescription) -> bool:
    """Whether the model has logits of tokens, which see earlier tokens only. It may embed nevertheless."""
    if description.score_head is not None or not isinstance(description, ModelDescription):
        return False
    return not description.is_bidirectional


def _not_computed(task: ModelTask, directory: Path) -> UnsupportedModel:
    return UnsupportedModel(
        f"the model in {directory} is not one whose {_VALUES[task]} are computed: docs/design/models.md has the "
        "architectures; scores are computed by those with a head of one label, or with a LogitScore in modules.json, "
        "and numbers of labels by those with a head of several"
    )


def _task_of_values(head: ScoreHeadSpec | None) -> ModelTask:
    if head is None:
        return ModelTask.EMBED
    return ModelTask.SCORE if head.num_labels == 1 else ModelTask.CLASSIFY
