"""What the tensors of a checkpoint are called in the description of its model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from math import prod

from worker_svc.model.description import ExpertsSpec, ModelDescription


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows `first` to `end` of one expert in a tensor of all experts."""

    whole: tuple[int, int, int]
    """The shape of that tensor: [experts, rows, inputs]."""
    expert: int
    first: int
    end: int

    @property
    def flat(self) -> range:
        """The rows in the tensor seen as [experts * rows, inputs]."""
        before = self.expert * self.whole[1]
        return range(before + self.first, before + self.end)


@dataclass(frozen=True, slots=True)
class OneExpert:
    """The part of one expert in a tensor whose first dimension is that of experts."""

    num_experts: int
    expert: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor of a description is in a checkpoint: it is the tensor `name`, or a part of it."""

    name: str
    part: ExpertRows | OneExpert | None = None

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor `name`, if the described one has this shape."""
        match self.part:
            case None:
                return shape
            case ExpertRows():
                return self.part.whole
            case OneExpert():
                return (self.part.num_experts, *shape)

    def rows(self, found: Sequence[int]) -> range | None:
        """The rows of the described tensor in the tensor `name`, which has the shape `found` and is seen as [rows, size
        of the last dimension]. None: all.
        """
        match self.part:
            case None:
                return None
            case ExpertRows():
                return self.part.flat
            case OneExpert():
                count = prod(found[1:-1])
                return range(self.part.expert * count, (self.part.expert + 1) * count)

    def is_stored_as(self, found: Sequence[int], shape: tuple[int, ...]) -> bool:
        """Whether the tensor `name` may have the shape `found`. Leading dimensions of 1 do not count: a single number
        may be stored without a dimension, and a bias with two.
        """
        return _without_leading_ones(found) == _without_leading_ones(self.whole(shape))


def _without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(dropwhile(lambda size: size == 1, shape))


def described_names(description: ModelDescription, stored: Collection[str]) -> dict[str, StoredTensor]:
    """The place of each stored tensor by its name in the description, without the unused ones.

    Checkpoints of the class without a head, such as Qwen3Model or GPT2Model, lack the first part of the names. Those
    that transformers saves with `save_original_format=False` have one tensor for all experts of a layer, as all
    checkpoints of some architectures have.
    """
    prefix, _, bare = description.embedding.partition(".")
    is_bare = bare in stored and description.embedding not in stored
    heads = tuple(f"{head.name}." for head in description.head.stored)

    def renamed(name: str) -> str:
        for old, new in description.renamed:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        return name

    def described(name: str) -> str:
        name = renamed(name)
        return renamed(f"{prefix}.{name}") if is_bare and not name.startswith(heads) else name

    kept = (name for name in stored if not name.endswith(description.unused_suffixes))
    names = {described(name): StoredTensor(name) for name in kept}
    names = {name: place for name, place in names.items() if not name.startswith(description.unused_prefixes)}
    for layer in description.layers:
        if isinstance(layer.mlp, ExpertsSpec):
            for fused, weights in _fused_weights(layer.mlp):
                if (of_all := names.pop(fused, None)) is not None:
                    names |= {name: StoredTensor(of_all.name, rows) for name, rows in weights}
    return _unstacked(description, names)


def _unstacked(description: ModelDescription, names: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The places with those of each expert instead of tensors with a dimension of experts."""
    mixtures = [layer.mlp for layer in description.layers if isinstance(layer.mlp, ExpertsSpec)]
    stacks = {mixture.stacked: mixture for mixture in mixtures if mixture.stacked is not None}
    if not stacks:
        return dict(names)
    places = {}
    for name, place in names.items():
        prefix, _, last = name.rpartition(".")
        prefix += "."
        spec = stacks.get(prefix)
        layer = None if spec is None else _layer_of(spec, prefix, last)
        if spec is None or layer is None:
            places[name] = place
            continue
        # "down_proj" is the weight, "down_proj_bias" the bias, and so on.
        tensor = last.removeprefix(layer).removeprefix("_") or "weight"
        count = len(spec.experts)
        for expert in range(count):
            places[f"{prefix}{expert}.{layer}.{tensor}"] = StoredTensor(place.name, OneExpert(count, expert))
    return places


def _layer_of(spec: ExpertsSpec, prefix: str, name: str) -> str | None:
    """The linear layer of experts that a tensor of all experts belongs to; None: it is no such tensor."""
    stored = (*spec.experts[0].gate_up.stored, *spec.experts[0].down.stored)
    layers = (layer.name.removeprefix(f"{prefix}0.") for layer in stored)
    return next((layer for layer in layers if name == layer or name.startswith(f"{layer}_")), None)


def _fused_weights(spec: ExpertsSpec) -> Iterator[tuple[str, list[tuple[str, ExpertRows]]]]:
    """The tensors of all experts of a layer, and of each the weights of the experts in it."""
    if spec.fused is None:
        return
    products = [mlp.gate_up for mlp in spec.experts], [mlp.down for mlp in spec.experts]
    for fused, layers in zip(spec.fused, products, strict=True):
        whole = len(layers), sum(layers[0].outputs), layers[0].inputs
        weights = []
        for expert, layer in enumerate(layers):
            first = 0
            for stored in layer.stored:
                end = first + sum(stored.outputs)
                weights.append((f"{stored.name}.weight", ExpertRows(whole, expert, first, end)))
                first = end
        yield fused, weights
