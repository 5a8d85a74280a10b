"""AWQ: codes of 4 bits that are packed along the outputs, in the layout of the version `gemm`.

Source: `WQLinear_GEMM.from_linear` of AutoAWQ 0.2.7, `awq/modules/linear/gemm.py`, and `dequantize_gemm` of its
`awq/utils/packing_utils.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._grouped import (
    SCALE_DTYPES,
    GroupedWeight,
    PackedCodes,
    require_dtype,
)
from worker_svc.model.formats._packing import unpack, words_of

_BITS = 4
# Words hold outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, from the lowest bits up: this is the place of each.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqFormat:
    """A `WeightFormat` of three tensors for each layer: `qweight`, `qzeros`, `scales`."""

    def __init__(self, group_size: int | None) -> None:
        """Of inputs; None: all inputs are one group."""
        self._group_size = group_size

    def read_as(self, name: str) -> str | None:
        return name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        packed_outputs = words_of(outputs, _BITS)
        groups = -(-inputs // (self._group_size or inputs))
        return {
            f"{layer}.qweight": (inputs, packed_outputs),
            f"{layer}.qzeros": (groups, packed_outputs),
            f"{layer}.scales": (groups, outputs),
        }

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        words, zeros, scales = (tensors[f"{layer}.{name}"] for name in ("qweight", "qzeros", "scales"))
        require_dtype(f"{layer}.qweight", words, torch.int32)
        require_dtype(f"{layer}.qzeros", zeros, torch.int32)
        require_dtype(f"{layer}.scales", scales, *SCALE_DTYPES)
        outputs, inputs = scales.shape[1], len(words)
        group_size = self._group_size or inputs
        if outputs % len(_ORDER) or inputs % group_size:
            raise UnsupportedModel(
                f"{layer}: AWQ stores weights of a multiple of {len(_ORDER)} outputs and {group_size} inputs, not of "
                f"{outputs} and {inputs}"
            )
        groups = torch.arange(inputs) // group_size
        return GroupedWeight(
            PackedCodes.whole(words, _BITS, 1, _ORDER), unpack(zeros, _BITS, 1, _ORDER), scales, groups
        )

    def group_bits(self, layer: str) -> int:
        return _BITS


def _make(quantization: Mapping[str, Any]) -> AwqFormat:
    fields = Fields(quantization)
    for name in ("version", "format", "checkpoint_format"):
        fields.word(name, ("gemm",), "gemm")
    if quantization.get("backend") == "llm-awq":
        raise fields.refuse("backend", "autoawq: the layout of llm-awq is not read")
    # Zero points are stored whether they differ or not, and the tensors themselves say which layers are quantized.
    fields.boolean("zero_point", default=True)
    fields.names("modules_to_not_convert")
    fields.one_of((_BITS,), "bits", "w_bit")
    return AwqFormat(fields.group_size("group_size", "q_group_size"))


FORMAT = _make
