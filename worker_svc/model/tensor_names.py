"""What the tensors of a checkpoint are called in the description of its model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from worker_svc.model.description import ExpertsSpec, ModelDescription
from worker_svc.model.weight_format import RenamedFormat, WeightFormat


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows `first` to `end` of one expert in a tensor of all experts."""

    of_all: tuple[int, int, int]
    """The shape of that tensor: [experts, rows, inputs]."""
    expert: int
    first: int
    end: int
    may_be_transposed: bool = False
    """Whether a checkpoint may have that tensor as [experts, inputs, rows]."""

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.of_all

    def is_transposed(self, found: Sequence[int]) -> bool:
        """Whether a tensor of the shape `found` is that tensor as [experts, inputs, rows]."""
        experts, rows, inputs = self.of_all
        return self.may_be_transposed and tuple(found) == (experts, inputs, rows) != self.of_all

    def rows(self, found: Sequence[int]) -> range:
        """Of a transposed tensor those of the whole expert."""
        before = self.expert * found[1]
        if self.is_transposed(found):
            return range(before, before + found[1])
        return range(before + self.first, before + self.end)

    def part_of(self, read: Tensor, found: Sequence[int]) -> Tensor:
        return read[:, self.first : self.end].t().contiguous() if self.is_transposed(found) else read


@dataclass(frozen=True, slots=True)
class OneExpert:
    """The part of one expert in a tensor whose first dimension is that of experts."""

    num_experts: int
    expert: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.num_experts, *shape)

    def rows(self, found: Sequence[int]) -> range:
        count = prod(found[1:-1])
        return range(self.expert * count, (self.expert + 1) * count)

    def part_of(self, read: Tensor, found: Sequence[int]) -> Tensor:
        return read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor of a description is in a checkpoint: it is the tensor `name`, or a part of it."""

    name: str
    part: ExpertRows | OneExpert | None = None

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor `name`, if the described one has this shape."""
        return shape if self.part is None else self.part.whole(shape)

    def rows(self, found: Sequence[int]) -> range | None:
        """What is read of the tensor `name`, which has the shape `found` and is seen as [rows, size of the last
        dimension]. None: all.
        """
        return None if self.part is None else self.part.rows(found)

    def part_of(self, read: Tensor, found: Sequence[int]) -> Tensor:
        """The described tensor, given these rows."""
        return read if self.part is None else self.part.part_of(read, found)

    def is_stored_as(self, found: Sequence[int], shape: tuple[int, ...]) -> bool:
        """Whether the tensor `name` may have the shape `found`, where `shape` is described; (-1,) is any number of
        elements. Dimensions of 1 do not count: a single number may be stored without a dimension, a bias with two, and
        scales of blocks with four.
        """
        if isinstance(self.part, ExpertRows) and self.part.is_transposed(found):
            return True
        sizes, others = ([size for size in each if size != 1] for each in (found, self.whole(shape)))
        if others == [-1]:
            return len(sizes) <= 1
        return sizes == others


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


def renamed_format(weight_format: WeightFormat, places: Mapping[str, StoredTensor]) -> WeightFormat:
    """A format that is asked by the names of a description, of a checkpoint whose tensors have these places."""
    layers = {
        name.rpartition(".")[0]: place.name.rpartition(".")[0] for name, place in places.items() if place.part is None
    }
    names = {layer: stored for layer, stored in layers.items() if layer != stored}
    return RenamedFormat(weight_format, names) if names else weight_format


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
                weights.append(
                    (f"{stored.name}.weight", ExpertRows(whole, expert, first, end, spec.fused_may_be_transposed))
                )
                first = end
        yield fused, weights
