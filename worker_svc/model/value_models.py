"""Which models compute values of prompts, instead of tokens: encoders, and decoders that embed or score."""

from pathlib import Path

from svc_common.models import ModelTask, task_of
from worker_svc.model.architecture import AnyDescription, architecture_names
from worker_svc.model.config import UnsupportedModel
from worker_svc.model.encoder_description import EncoderDescription


def computes_values(directory: Path, description: AnyDescription | None, chosen: str) -> bool:
    """Whether the model in a directory computes values; `chosen` is QUIRE_TASK.

    Raises UnsupportedModel if it does not compute what is chosen, and ModelNotFound as `task_of` does.
    """
    has_head = description is not None and description.score_head is not None
    if not has_head and not isinstance(description, EncoderDescription):
        task = task_of(directory, chosen)
        if task is ModelTask.GENERATE:
            return False
        if task is ModelTask.SCORE or description is None:
            values = "scores" if task is ModelTask.SCORE else "embeddings"
            names = ", ".join(architecture_names())
            raise UnsupportedModel(
                f"the model in {directory} is not one whose {values} are computed; architectures are {names}, and "
                "scores are computed by those with a head of one output"
            )
        return True
    assert description is not None
    computed = "scores of pairs of texts" if has_head else "embeddings"
    if chosen == "generate" or (chosen == "embed" and has_head):
        raise UnsupportedModel(f"QUIRE_TASK is {chosen}, but this {description.architecture} model computes {computed}")
    return True
