"""compressed-tensors: codes of 2 to 8 bits, packed or one in each byte, or in float8_e4m3fn; layers may differ.

Source: compressed-tensors 0.20.0, `compressed_tensors/compressors/pack_quantized`, `.../naive_quantized`,
`compressed_tensors/quantization/lifecycle/forward_helpers.py` (`_dequantize`) and `compressed_tensors/utils/match.py`
(`match_targets`). The order of activations as groups (`weight_g_idx`) is that of 0.12.2, which later versions dropped.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._grouped import SCALE_DTYPES, GroupedWeight, PackedCodes, require_dtype
from worker_svc.model.formats._packing import unpack, words_of
from worker_svc.model.formats._scaled import ScaledWeight, blocks, num_blocks
from worker_svc.model.formats._unread import UNREAD
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.weight_format import StoredWeight

_PACKED = "pack-quantized"
_TYPES = {
    _PACKED: ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""Of codes, by the layout in which a group of layers is stored; the first is the default."""
# The layout of packed codes of 3, 5, 6 and 7 bits differs between versions of the package.
_PACKED_BITS = (2, 4, 8)
_IN_BYTES_BITS = range(2, 9)
_NIBBLE = 4  # bits
_MIXED = "mixed-precision"
_REGEX = "re:"
_LINEAR = "Linear"


@dataclass(frozen=True, slots=True)
class _LayerScheme:
    """How the weights of a group of layers are quantized."""

    is_packed: bool
    is_float: bool
    bits: int
    symmetric: bool
    strategy: str
    block: tuple[int | None, int | None]
    """Outputs and inputs that have one scale; None: all of them."""
    in_act_order: bool
    """Whether the group of each input is stored."""

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors, by the last parts of their names."""
        rows, columns = num_blocks(outputs, self.block[0]), num_blocks(inputs, self.block[1])
        shapes: dict[str, tuple[int, ...]] = {}
        if self.is_packed:
            shapes["weight_packed"] = (outputs, words_of(inputs, self.bits))
            shapes["weight_shape"] = (2,)
        else:
            shapes["weight"] = (outputs, inputs)
        shapes["weight_scale"] = (1,) if self.strategy == "tensor" else (rows, columns)
        if not self.symmetric:
            packed = words_of(outputs, self.bits), columns
            shapes["weight_zero_point"] = packed if self.is_packed else shapes["weight_scale"]
        if self.in_act_order:
            shapes["weight_g_idx"] = (inputs,)
        return shapes


class CompressedTensorsFormat:
    """A `WeightFormat` of two to five tensors for each layer: its scheme says which."""

    def __init__(self, schemes: Mapping[str, _LayerScheme]) -> None:
        """Schemes by target: the name of a layer, a regular expression of names after `re:`, or a class of layers."""
        self._layers = {target: scheme for target, scheme in schemes.items() if not target.startswith(_REGEX)}
        # The package that writes these models tries patterns in this order, whatever that of the groups.
        self._patterns = [
            (_compiled(target), schemes[target]) for target in sorted(schemes) if target.startswith(_REGEX)
        ]
        self._dense = DenseFormat()

    def read_as(self, name: str) -> str | None:
        return None if name.endswith(UNREAD) else name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        scheme = self._scheme_of(layer)
        if scheme is None:
            return self._dense.tensors(layer, outputs, inputs)
        return {f"{layer}.{name}": shape for name, shape in scheme.shapes(outputs, inputs).items()}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
        scheme = self._scheme_of(layer)
        if scheme is None:
            return self._dense.weight(layer, tensors)
        scales = tensors[f"{layer}.weight_scale"]
        require_dtype(f"{layer}.weight_scale", scales, *SCALE_DTYPES)
        read = _packed_weight if scheme.is_packed else _weight_in_bytes
        return read(layer, scheme, tensors, scales)

    def group_bits(self, layer: str) -> int | None:
        scheme = self._scheme_of(layer)
        if scheme is None or scheme.is_float:
            return None
        in_groups = scheme.strategy == "group" and scheme.block[1] is not None
        return scheme.bits if in_groups or scheme.bits <= _NIBBLE else None

    def _scheme_of(self, layer: str) -> _LayerScheme | None:
        """None: no group has the layer."""
        if (scheme := self._layers.get(layer)) is not None:
            return scheme
        of_patterns = (scheme for pattern, scheme in self._patterns if pattern.match(layer))
        return next(of_patterns, self._layers.get(_LINEAR))


def _packed_weight(layer: str, scheme: _LayerScheme, tensors: Mapping[str, Tensor], scales: Tensor) -> GroupedWeight:
    words, shape = tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_shape"]
    require_dtype(f"{layer}.weight_packed", words, torch.int32)
    require_dtype(f"{layer}.weight_shape", shape, torch.int32, torch.int64)
    bits = scheme.bits
    outputs, inputs = map(int, shape)
    if (outputs, words_of(inputs, bits)) != words.shape:
        raise UnsupportedModel(
            f"the tensor {layer}.weight_shape is {[outputs, inputs]}, and {layer}.weight_packed {list(words.shape)}, "
            f"not {[outputs, words_of(inputs, bits)]}"
        )
    # Codes are stored more than they mean by half of their range, and zero points too.
    zeros = torch.full((scales.shape[1], outputs), 1 << bits - 1, dtype=torch.uint8)
    if not scheme.symmetric:
        stored = tensors[f"{layer}.weight_zero_point"]
        require_dtype(f"{layer}.weight_zero_point", stored, torch.int32)
        zeros = unpack(stored.t(), bits, 1)[:, :outputs]
    groups = _columns(layer, scheme, tensors, inputs)
    return GroupedWeight(PackedCodes(words.t(), bits, 0, None, 0, inputs), zeros, scales.t(), groups)


def _weight_in_bytes(layer: str, scheme: _LayerScheme, tensors: Mapping[str, Tensor], scales: Tensor) -> ScaledWeight:
    codes = tensors[f"{layer}.weight"]
    require_dtype(f"{layer}.weight", codes, torch.float8_e4m3fn if scheme.is_float else torch.int8)
    outputs, inputs = codes.shape
    rows = num_blocks(outputs, scheme.block[0])
    zeros = None
    if not scheme.symmetric:
        zeros = tensors[f"{layer}.weight_zero_point"]
        require_dtype(f"{layer}.weight_zero_point", zeros, torch.int8)
        zeros = zeros.view(rows, -1)
    columns = _columns(layer, scheme, tensors, inputs)
    return ScaledWeight(codes, scales.view(rows, -1), zeros, blocks(outputs, scheme.block[0]), columns)


def _columns(layer: str, scheme: _LayerScheme, tensors: Mapping[str, Tensor], inputs: int) -> Tensor:
    """int64 [inputs]: the column of each input's scale."""
    size = scheme.block[1]
    if scheme.strategy == "group" and inputs % (size or inputs):
        raise UnsupportedModel(f"{layer}: its {inputs} inputs are no multiple of the group size {size}")
    in_order = blocks(inputs, size)
    if not scheme.in_act_order:
        return in_order
    groups = tensors[f"{layer}.weight_g_idx"]
    require_dtype(f"{layer}.weight_g_idx", groups, torch.int32, torch.int64)
    if (groups == -1).any():  # what the package fills the tensor with before it knows an order
        return in_order
    if not torch.equal(groups.sort().values.long(), in_order):
        raise UnsupportedModel(f"the tensor {layer}.weight_g_idx must have each group {size} times")
    return groups.long()


def _make(quantization: Mapping[str, Any]) -> CompressedTensorsFormat:
    fields = Fields(quantization)
    layout = fields.word("format", (*_TYPES, _MIXED), _MIXED)
    fields.object("sparsity_config").word("format", ("dense",), "dense")
    if fields.object("transform_config").mapping("config_groups"):
        raise fields.refuse("transform_config", "null: transforms of activations are not computed")
    if fields.has("moe_sparsity_config"):
        raise fields.refuse("moe_sparsity_config", "null: layers with other numbers of experts are not computed")
    # The tensors themselves say which layers are quantized.
    fields.names("ignore")
    schemes: dict[str, _LayerScheme] = {}
    for group in fields.objects("config_groups"):
        scheme = _scheme(group, layout)
        targets = group.names("targets")
        if scheme is not None:
            schemes |= dict.fromkeys(targets, scheme)
    return CompressedTensorsFormat(schemes)


def _scheme(group: Fields, model_layout: str) -> _LayerScheme | None:
    """How a group's weights are quantized; None: they are not."""
    if not group.has("weights"):
        return None
    layout = group.word("format", tuple(_TYPES), model_layout)
    if layout == _MIXED:
        raise group.refuse("format", f"{', '.join(_TYPES)}, since the model's format names none for all groups")
    weights = group.object("weights")
    is_packed = layout == _PACKED
    is_float = weights.word("type", _TYPES[layout], _TYPES[layout][0]) == "float"
    bits = weights.one_of((8,) if is_float else _PACKED_BITS if is_packed else _IN_BYTES_BITS, "num_bits")
    symmetric = weights.boolean("symmetric", default=True)
    if is_float and not symmetric:
        raise weights.refuse("symmetric", "true: codes in FP8 have no zero point")
    if weights.boolean("dynamic", default=False):
        raise weights.refuse("dynamic", "false: scales of weights are stored")
    strategies = ("channel", "group") if is_packed else ("block", "channel", "group", "tensor")
    strategy = weights.word("strategy", strategies, "group" if weights.has("group_size") else "tensor")
    actorder = weights.word("actorder", ("dynamic", "group", "static", "weight"), "weight")
    in_act_order = strategy == "group" and actorder in ("dynamic", "group")
    return _LayerScheme(is_packed, is_float, bits, symmetric, strategy, _block(weights, strategy), in_act_order)


def _block(weights: Fields, strategy: str) -> tuple[int | None, int | None]:
    """Outputs and inputs that have one scale."""
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, weights.group_size("group_size")
    block = weights.block("block_structure")
    if block is None:
        raise weights.refuse("block_structure", "two numbers, of outputs and inputs, where strategy is block")
    return block


def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix(_REGEX))
    except re.error as error:
        raise UnsupportedModel(
            f"quantization_config.config_groups: the target {target!r} is no regular expression: {error}"
        ) from error


FORMAT = _make
