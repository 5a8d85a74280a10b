"""MXFP4 as gpt-oss is published: experts in codes of e2m1, in groups of 32 inputs with a power of two as scale.

Source: `_convert_moe_packed_tensors` of transformers 5.23, `transformers/integrations/mxfp4.py`. All other layers are
dense.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from worker_svc.model.formats._e2m1 import MX_GROUP, E2m1Weight
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._grouped import require_dtype
from worker_svc.model.weight_format import BlockForm


class Mxfp4Format:
    """A `WeightFormat` of two tensors for each layer: `blocks` and `scales`."""

    def read_as(self, name: str) -> str | None:
        return name

    def block_form(self, layer: str) -> BlockForm:
        return BlockForm(4, MX_GROUP, is_e2m1=True)

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        groups = -(-inputs // MX_GROUP)
        return {f"{layer}.blocks": (outputs, groups, MX_GROUP // 2), f"{layer}.scales": (outputs, groups)}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> E2m1Weight:
        blocks, scales = tensors[f"{layer}.blocks"], tensors[f"{layer}.scales"]
        require_dtype(f"{layer}.blocks", blocks, torch.uint8)
        require_dtype(f"{layer}.scales", scales, torch.uint8, torch.float8_e8m0fnu)
        return E2m1Weight(layer, blocks.flatten(1), scales.view(torch.float8_e8m0fnu), MX_GROUP)


def _make(quantization: Mapping[str, Any]) -> Mxfp4Format:
    # The tensors themselves say which layers are quantized.
    Fields(quantization).names("modules_to_not_convert")
    return Mxfp4Format()


FORMAT = _make
