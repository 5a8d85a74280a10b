"""What the tensors of a checkpoint are called in the description of its model."""

from collections.abc import Collection

from worker_svc.model.description import ModelDescription


def described_names(description: ModelDescription, stored: Collection[str]) -> dict[str, str]:
    """The stored name of each tensor by its name in the description, without the unused ones.

    Checkpoints of the class without a head, such as Qwen3Model or GPT2Model, lack the first part of the names.
    """
    prefix, _, bare = description.embedding.partition(".")
    is_bare = bare in stored and description.embedding not in stored
    heads = tuple(f"{head.name}." for head in description.head.stored)

    def described(name: str) -> str:
        for old, new in description.renamed:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        return f"{prefix}.{name}" if is_bare and not name.startswith(heads) else name

    return {described(name): name for name in stored if not name.endswith(description.unused_suffixes)}
