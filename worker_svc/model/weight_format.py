"""The formats in which checkpoints store the weights of linear layers.

Each is a module of `formats`, or an entry point of `quire.weight_formats`. Its name is the `quant_method` of a model's
`quantization_config`; a model without that is dense. A format names the tensors of a linear layer, and makes a weight
of them that can be cut into parts and ranks before it is unpacked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from quire_kernels.cpu.nibbles import E2M1_DOUBLES
from worker_svc.errors import UnsupportedModel
from worker_svc.model import formats
from worker_svc.model.config import raw_config, read_object
from worker_svc.plugins import Registry

_DENSE = "dense"
# Where AutoGPTQ, AutoAWQ and ModelOpt wrote what is in config.json today.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


class StoredWeight(Protocol):
    """The weight [outputs, inputs] of a stored linear layer, packed or not, on the CPU."""

    def outputs(self, start: int, stop: int) -> "StoredWeight":
        """A range of outputs. Raises UnsupportedModel if the format cannot be cut there."""

    def inputs(self, start: int, stop: int) -> "StoredWeight":
        """A range of inputs. Raises UnsupportedModel if the format cannot be cut there."""

    def dense(self) -> Tensor:
        """The weight in floating point, [outputs, inputs]."""


@runtime_checkable
class SizedWeight(Protocol):
    """What a `StoredWeight` may offer besides: its size, where tensors of the same shapes may have another one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""


@runtime_checkable
class StridedWeight(Protocol):
    """What a `StoredWeight` may offer besides: outputs at equal distances, which else are cut out one by one."""

    def strided(self, outputs: slice) -> StoredWeight:
        """The outputs of a slice with a step."""


@runtime_checkable
class CodedWeight(Protocol):
    """What a `StoredWeight` may offer besides: that it is stored as it can be multiplied."""

    def code_scales(self) -> Tensor | None:
        """The scale of each output, float32 [outputs], if each number is a signed code of 8 bits times that; else None.

        Numbers that are rounded to 8 bits with these scales are the stored codes again.
        """


def code_scales(weight: StoredWeight) -> Tensor | None:
    """`CodedWeight.code_scales`; None if the weight offers none."""
    return weight.code_scales() if isinstance(weight, CodedWeight) else None


@runtime_checkable
class Float8Weight(Protocol):
    """What a `StoredWeight` may offer besides: that its numbers are codes in float8_e4m3fn."""

    def float8_scales(self) -> Tensor | None:
        """The scales, float32 [outputs, 1], or one for each SCALED_GROUP inputs; None: the weight has other ones.

        Numbers that are rounded to float8_e4m3fn with these scales are the stored codes again.
        """


def float8_scales(weight: StoredWeight) -> Tensor | None:
    """`Float8Weight.float8_scales`; None if the weight offers none."""
    return weight.float8_scales() if isinstance(weight, Float8Weight) else None


@dataclass(frozen=True, slots=True, eq=False)
class GroupCodes:
    """The numbers of a weight in at most 4 bits: each is (code - zero) x scale of its group."""

    codes: Tensor
    """uint8 [outputs, inputs], at most 15."""
    zeros: Tensor
    """[outputs, groups], from 0 to 15."""
    scales: Tensor
    """[outputs, groups]."""
    groups: Tensor
    """int64 [inputs]: the group of each input."""


@runtime_checkable
class GroupCodedWeight(Protocol):
    """What a `StoredWeight` may offer besides: the codes of groups of inputs."""

    def group_codes(self) -> GroupCodes | None:
        """The codes as they are stored, if they have at most 4 bits; else None."""


def group_codes(weight: StoredWeight) -> GroupCodes | None:
    """`GroupCodedWeight.group_codes`; None if the weight offers none."""
    return weight.group_codes() if isinstance(weight, GroupCodedWeight) else None


class CodeForm(NamedTuple):
    """The form in which a product keeps codes."""

    bits: int
    """4 or 8."""
    group: int
    """How many neighbouring inputs are a group."""

    @property
    def bytes_held(self) -> float:
        """What a number takes at least, with its part of a scale, and in 4 bits of a zero point, in float16."""
        return 0.5 + 4 / self.group if self.bits == 4 else 1 + 2 / self.group


@dataclass(frozen=True, slots=True, eq=False)
class BlockCodes:
    """The numbers of a weight in at most 8 bits: each is (code - zero) x scale of its group, plus its minimum."""

    codes: Tensor
    """uint8 [outputs, inputs]."""
    bits: int
    """That a code needs."""
    zero: int
    scales: Tensor
    """float32 [outputs, groups]."""
    minimums: Tensor | None
    """float32 [outputs, groups]; None: there are none."""
    group: int
    """How many neighbouring inputs are a group."""
    is_e2m1: bool = False
    """Whether codes have 4 bits and are numbers of e2m1: a number is E2M1_DOUBLES[code] x scale."""
    factors: Tensor | None = None
    """float32 [outputs]: what all numbers of an output are multiplied by besides; None: 1."""

    def whole(self) -> "BlockCodes":
        """The same numbers in codes that are whole numbers."""
        if not self.is_e2m1:
            return self
        codes = (torch.tensor(E2M1_DOUBLES) + max(E2M1_DOUBLES)).to(torch.uint8)[self.codes.int()]
        return replace(self, codes=codes, bits=5, zero=max(E2M1_DOUBLES), is_e2m1=False)


def joined_factors(parts: Sequence[tuple[int, Tensor | None]], join: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    """`BlockCodes.factors` of parts together, given the outputs of each and its own; None: no part has some."""
    if all(factors is None for _, factors in parts):
        return None
    return join([torch.ones(outputs) if factors is None else factors for outputs, factors in parts])


@runtime_checkable
class BlockCodedWeight(Protocol):
    """What a `StoredWeight` may offer besides: codes that products keep, whatever bits the settings choose."""

    def block_codes(self) -> BlockCodes | None:
        """The codes as they are stored, or None."""


def block_codes(weight: StoredWeight) -> BlockCodes | None:
    """`BlockCodedWeight.block_codes`; None if the weight offers none."""
    return weight.block_codes() if isinstance(weight, BlockCodedWeight) else None


class WeightFormat(Protocol):
    """How one checkpoint stores its linear layers."""

    def read_as(self, name: str) -> str | None:
        """What `tensors` calls a tensor that the checkpoint has under `name`; None: it is not read.

        Names of tensors that are no part of the format stay.
        """

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the tensors that hold the weight of the stored linear layer `layer`.

        A layer of which the checkpoint has `layer`.weight, and no other tensor of these, is read as a dense one.
        """

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
        """The weight, from these tensors as they are stored. Raises UnsupportedModel if they do not match."""


class BlockForm(NamedTuple):
    """The codes of a layer whose weight is a `BlockCodedWeight`, as they are stored."""

    bits: int
    group: int
    """How many neighbouring inputs have one scale."""
    is_e2m1: bool = False


@runtime_checkable
class BlockFormat(Protocol):
    """What a `WeightFormat` may offer besides: layers whose weights are `BlockCodedWeight`."""

    def block_form(self, layer: str) -> BlockForm | None:
        """None: a layer's weight has no block codes."""


def block_form(weight_format: WeightFormat, layer: str) -> BlockForm | None:
    """`BlockFormat.block_form`; None if the format has no such layers."""
    return weight_format.block_form(layer) if isinstance(weight_format, BlockFormat) else None


@runtime_checkable
class GroupFormat(Protocol):
    """What a `WeightFormat` may offer besides: layers whose codes are kept, if they are no experts: in up to 4 bits of
    a `GroupCodedWeight`, in 8 of a `BlockCodedWeight`.
    """

    def group_bits(self, layer: str) -> int | None:
        """The bits of a layer's codes; None: it has none in groups, or of 8 bits one group for each output."""


def group_bits(weight_format: WeightFormat, layer: str) -> int | None:
    """`GroupFormat.group_bits`; None if the format has no such layers."""
    return weight_format.group_bits(layer) if isinstance(weight_format, GroupFormat) else None


class RenamedFormat:
    """A `WeightFormat` of a checkpoint whose layers have other names than in the description: another format is asked
    by these.
    """

    def __init__(self, stored: WeightFormat, names: Mapping[str, str]) -> None:
        """`names` are those in the checkpoint, by those in the description, where they differ."""
        self._stored, self._names = stored, names

    def read_as(self, name: str) -> str | None:
        return self._stored.read_as(name)

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        name = self._name_of(layer)
        shapes = self._stored.tensors(name, outputs, inputs)
        return {f"{layer}{tensor.removeprefix(name)}": shape for tensor, shape in shapes.items()}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
        name = self._name_of(layer)
        return self._stored.weight(name, {f"{name}{key.removeprefix(layer)}": each for key, each in tensors.items()})

    def block_form(self, layer: str) -> BlockForm | None:
        return block_form(self._stored, self._name_of(layer))

    def group_bits(self, layer: str) -> int | None:
        return group_bits(self._stored, self._name_of(layer))

    def _name_of(self, layer: str) -> str:
        return self._names.get(layer, layer)


def equal_groups(groups: Tensor, sizes: Iterable[int]) -> int | None:
    """The first of these sizes that all groups of neighbouring inputs are multiples of, of the group of each input;
    None: there is none.
    """
    for size in sizes:
        if torch.equal(groups[::size].repeat_interleave(size)[: len(groups)], groups):
            return size
    return None


def names_read(weight_format: WeightFormat, stored: Iterable[str]) -> dict[str, str]:
    """The tensors of a checkpoint that are read: their names in it, by what its format calls them."""
    read_as = {name: weight_format.read_as(name) for name in stored}
    return {read: name for name, read in read_as.items() if read is not None}


FormatFactory: TypeAlias = Callable[[Mapping[str, Any]], WeightFormat]
"""Makes a format, given a model's `quantization_config`. Raises UnsupportedModel for a variant that is not read."""

_registry = Registry(formats, "FORMAT", "quire.weight_formats", callable, "a function of a quantization_config")


def quantization_of(directory: Path) -> Mapping[str, Any] | None:
    """The `quantization_config` of config.json, or that of an old model's own file; None: the weights are dense.

    Raises UnsupportedModel if it is not an object.
    """
    raw = raw_config(directory)
    for key in ("quantization_config", "compression_config"):
        quantization = raw.get(key)
        if isinstance(quantization, dict):
            return quantization
        if quantization is not None:
            raise UnsupportedModel(f"{directory / 'config.json'}: {key} must be an object, not {quantization!r}")
    path = _old_file(directory)
    if "quantization_config" in raw or path is None:
        return None
    return read_object(path) | {"quant_method": _OLD_FILES[path.name]}


def _old_file(directory: Path) -> Path | None:
    return next((path for name in _OLD_FILES if (path := directory / name).is_file()), None)


def format_identity(directory: Path) -> bytes:
    """Changes with the package that registers the format of a model's weights, and with what describes them outside of
    config.json; empty if the format is Quire's own and config.json describes it.

    Raises StartupFailed if the package's module cannot be read.
    """
    quantization = quantization_of(directory)
    path = _old_file(directory)
    described = path.read_bytes() if quantization is not None and path is not None else b""
    return described + _registry.identity(_method(quantization))


def _method(quantization: Mapping[str, Any] | None) -> str:
    return _DENSE if quantization is None else str(quantization.get("quant_method", "unnamed"))


def format_of(directory: Path) -> WeightFormat:
    """The format of a model's weights. Raises UnsupportedModel if no registered format reads them."""
    quantization = quantization_of(directory)
    method = _method(quantization)
    if quantization is not None and method == _DENSE:
        raise UnsupportedModel(
            f"the model in {directory} has quantized weights of the format {_DENSE}, which is that of models without a "
            "quantization_config"
        )
    factory: FormatFactory | None = _registry.find(method)
    if factory is None:
        raise UnsupportedModel(
            f"the model in {directory} has quantized weights of the format {method}, which is not read; the formats "
            f"that are read: {', '.join(_registry.names())}"
        )
    with _registry.running(method):
        return factory(quantization or {})
