"""Which models compute values of prompts, instead of tokens: encoders, and decoders that embed, score or classify."""

from pathlib import Path

from svc_common.model_tasks import ModelTask, task_of
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import AnyDescription, architecture_names
from worker_svc.model.description import ModelDescription
from worker_svc.model.score_files import with_score_files
from worker_svc.model.score_head_description import ScoreHeadSpec


def for_task(description: AnyDescription | None, directory: Path, chosen: str) -> tuple[AnyDescription | None, bool]:
    """The description of the model in a directory for its task, and whether it computes values.

    `chosen` is QUIRE_TASK. If the model scores or classifies, the description has the head that its files say.

    Raises UnsupportedModel if it does not compute what is chosen, and DamagedModelFile as `task_of` does.
    """
    described = with_score_files(description, directory, chosen)
    return described, _computes_values(described, directory, chosen)


_VALUES = {
    ModelTask.EMBED: "embeddings",
    ModelTask.SCORE: "scores of pairs of texts",
    ModelTask.CLASSIFY: "numbers of labels",
}


def _computes_values(description: AnyDescription | None, directory: Path, chosen: str) -> bool:
    if description is None or (description.score_head is None and isinstance(description, ModelDescription)):
        task = task_of(directory, chosen)
        if task is ModelTask.GENERATE:
            if description is not None and description.is_bidirectional:
                raise UnsupportedModel(
                    f"the tokens of the {description.architecture} model in {directory} see later ones, so it "
                    "generates none; QUIRE_TASK=embed makes it compute embeddings"
                )
            return False
        if task is not ModelTask.EMBED or description is None:
            values = _VALUES[task]
            names = ", ".join(architecture_names())
            raise UnsupportedModel(
                f"the model in {directory} is not one whose {values} are computed; architectures are {names}, and "
                "scores are computed by those with a head of one label, or with a LogitScore in modules.json, and "
                "numbers of labels by those with a head of several"
            )
        return True
    computed = _task_of_values(description.score_head)
    if chosen == "generate" or (chosen == "embed" and computed is not ModelTask.EMBED):
        values = _VALUES[computed]
        raise UnsupportedModel(f"QUIRE_TASK is {chosen}, but this {description.architecture} model computes {values}")
    if computed is ModelTask.EMBED and task_of(directory, chosen) is ModelTask.GENERATE:  # by its class
        raise UnsupportedModel(
            f"the {description.architecture} model in {directory} generates no tokens, and its files do not say that "
            "it embeds; QUIRE_TASK=embed makes it compute embeddings"
        )
    return True


def _task_of_values(head: ScoreHeadSpec | None) -> ModelTask:
    if head is None:
        return ModelTask.EMBED
    return ModelTask.SCORE if head.num_labels == 1 else ModelTask.CLASSIFY
