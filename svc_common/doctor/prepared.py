"""Whether a model's files are there, or `make run` would download or convert them first, and what to do if not."""

from dataclasses import replace

from svc_common.models import DamagedModelFile, ModelNotFound, find_source, find_tokenizer


def is_prepared(
    model: str | None,
    revision: str | None,
    tokenizer: str | None,
    tokenizer_revision: str | None,
    *,
    with_weights: bool,
) -> bool:
    """Whether the directories of a model and of its tokenizer exist. Raises ModelNotFound, as `find_source` does."""
    source = replace(find_source(model, revision), with_weights=with_weights)
    other = find_tokenizer(model, revision, tokenizer, tokenizer_revision)
    directories = [each.directory() for each in (source, other) if each is not None]
    return all(directory is not None and directory.is_dir() for directory in directories)


def next_step_for(error: ModelNotFound) -> str:
    """What to do about a model that is not found."""
    text = str(error)
    if isinstance(error, DamagedModelFile):
        return "correct the file, or download the model's files again"
    if "run `" in text:
        return "run this command, which downloads or converts the model"
    if "it has no " in text:
        return "copy the missing files there, or set QUIRE_MODEL to another model"
    return "set QUIRE_MODEL (and QUIRE_TOKENIZER) to a directory, a GGUF file or a hub id; unset: the default model"
