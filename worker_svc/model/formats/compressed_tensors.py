"""compressed-tensors: codes of 2 to 8 bits, packed or one in each byte, or in float8_e4m3fn or e2m1; layers may differ.

Source: compressed-tensors 0.20.0, `compressed_tensors/compressors/pack_quantized`, `.../naive_quantized`, `.../nvfp4`,
`.../mxfp4`, `.../mxfp8`, `compressed_tensors/quantization/lifecycle/forward_helpers.py` (`_dequantize`) and
`compressed_tensors/utils/match.py` (`match_targets`). The order of activations as groups (`weight_g_idx`) is that of
0.12.2, which later versions dropped.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._e2m1 import MX_GROUP, NV_GROUP, E2m1Format
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._float8 import Float8Format
from worker_svc.model.formats._grouped import SCALE_DTYPES, GroupedWeight, PackedCodes, require_dtype
from worker_svc.model.formats._layered import DENSE, LayeredFormat
from worker_svc.model.formats._packing import unpack, words_of
from worker_svc.model.formats._scaled import Block, ScaledWeight, blocks, num_blocks
from worker_svc.model.formats._unread import UNREAD
from worker_svc.model.weight_format import StoredWeight, WeightFormat

NVFP4 = E2m1Format("weight_packed", NV_GROUP, "weight_global_scale", divides=True)
MXFP4 = E2m1Format("weight_packed", MX_GROUP)
_PACKED, _NVFP4, _MXFP4, _MXFP8 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
_TYPES = {
    _PACKED: ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
    _NVFP4: ("float",),
    _MXFP4: ("float",),
    _MXFP8: ("float",),
}
"""Of codes, by the layout in which a group of layers is stored; the first is the default."""
# The layout of packed codes of 3, 5, 6 and 7 bits differs between versions of the package.
_PACKED_BITS = (2, 4, 8)
_IN_BYTES_BITS = range(2, 9)
_NIBBLE = 4  # bits
# Strategies of groups that a layout may have.
_STRATEGIES = {
    _PACKED: ("channel", "group"),
    _NVFP4: ("group", "tensor_group"),
    _MXFP4: ("group",),
    _MXFP8: ("group",),
}
_OF_CODES_IN_BYTES = ("block", "channel", "group", "tensor")
_IN_FIXED_GROUPS: Mapping[str, tuple[WeightFormat, int]] = {
    _NVFP4: (NVFP4, NV_GROUP),
    _MXFP4: (MXFP4, MX_GROUP),
    _MXFP8: (Float8Format((1, MX_GROUP)), MX_GROUP),
}
"""The format of a layout, and how many inputs have one scale."""
_MIXED = "mixed-precision"
_REGEX = "re:"
_LINEAR = "Linear"


@dataclass(frozen=True, slots=True)
class _CodesFormat:
    """A `WeightFormat` of two to five tensors for each layer: of codes of 2 to 8 bits."""

    is_packed: bool
    is_float: bool
    bits: int
    symmetric: bool
    strategy: str
    block: Block
    in_act_order: bool
    """Whether the group of each input is stored."""

    def read_as(self, name: str) -> str | None:
        return None if name.endswith(UNREAD) else name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        return {f"{layer}.{name}": shape for name, shape in self._shapes(outputs, inputs).items()}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
        scales = tensors[f"{layer}.weight_scale"]
        require_dtype(f"{layer}.weight_scale", scales, *SCALE_DTYPES)
        read = _packed_weight if self.is_packed else _weight_in_bytes
        return read(layer, self, tensors, scales)

    def group_bits(self, layer: str) -> int | None:
        if self.is_float:
            return None
        in_groups = self.strategy == "group" and self.block[1] is not None
        return self.bits if in_groups or self.bits <= _NIBBLE else None

    def _shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
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


def _packed_weight(layer: str, scheme: _CodesFormat, tensors: Mapping[str, Tensor], scales: Tensor) -> GroupedWeight:
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


def _weight_in_bytes(layer: str, scheme: _CodesFormat, tensors: Mapping[str, Tensor], scales: Tensor) -> ScaledWeight:
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


def _columns(layer: str, scheme: _CodesFormat, tensors: Mapping[str, Tensor], inputs: int) -> Tensor:
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


def _make(quantization: Mapping[str, Any]) -> LayeredFormat:
    fields = Fields(quantization)
    layout = fields.word("format", (*_TYPES, _MIXED), _MIXED)
    fields.object("sparsity_config").word("format", ("dense",), "dense")
    if fields.object("transform_config").mapping("config_groups"):
        raise fields.refuse("transform_config", "null: transforms of activations are not computed")
    if fields.has("moe_sparsity_config"):
        raise fields.refuse("moe_sparsity_config", "null: layers with other numbers of experts are not computed")
    # The tensors themselves say which layers are quantized.
    fields.names("ignore")
    formats: dict[str, WeightFormat] = {}
    for group in fields.objects("config_groups"):
        found = _format_of(group, layout)
        targets = group.texts("targets")
        if found is not None:
            formats |= dict.fromkeys(targets, found)
    # The package that writes these models tries patterns in this order, whatever that of the groups.
    patterns = [
        (fields.pattern("config_groups", target.removeprefix(_REGEX)), formats[target])
        for target in sorted(formats)
        if target.startswith(_REGEX)
    ]
    layers = {target: found for target, found in formats.items() if not target.startswith(_REGEX)}
    return LayeredFormat(formats.get(_LINEAR, DENSE), layers, patterns)


def _format_of(group: Fields, model_layout: str) -> WeightFormat | None:
    """The format of a group's weights; None: they are not quantized."""
    if not group.has("weights"):
        return None
    layout = group.word("format", tuple(_TYPES), model_layout)
    if layout == _MIXED:
        raise group.refuse("format", f"{', '.join(_TYPES)}, since the model's format names none for all groups")
    weights = group.object("weights")
    is_float = weights.word("type", _TYPES[layout], _TYPES[layout][0]) == "float"
    bits = weights.one_of(_bits(layout, is_float=is_float), "num_bits")
    symmetric = weights.boolean("symmetric", default=True)
    if is_float and not symmetric:
        raise weights.refuse("symmetric", "true: codes of floating-point numbers have no zero point")
    if weights.boolean("dynamic", default=False):
        raise weights.refuse("dynamic", "false: scales of weights are stored")
    strategies = _STRATEGIES.get(layout, _OF_CODES_IN_BYTES)
    strategy = weights.word("strategy", strategies, "group" if weights.has("group_size") else "tensor")
    if layout in _IN_FIXED_GROUPS:
        found, size = _IN_FIXED_GROUPS[layout]
        weights.one_of((size,), "group_size")
        return found
    actorder = weights.word("actorder", ("dynamic", "group", "static", "weight"), "weight")
    in_act_order = strategy == "group" and actorder in ("dynamic", "group")
    return _CodesFormat(layout == _PACKED, is_float, bits, symmetric, strategy, _block(weights, strategy), in_act_order)


def _bits(layout: str, *, is_float: bool) -> Collection[int]:
    """Those of a code."""
    if layout in (_NVFP4, _MXFP4):
        return (_NIBBLE,)
    if is_float:
        return (8,)
    return _PACKED_BITS if layout == _PACKED else _IN_BYTES_BITS


def _block(weights: Fields, strategy: str) -> Block:
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


FORMAT = _make
