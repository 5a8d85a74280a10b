"""Formats of one code in float8_e4m3fn for each number, and a scale for each block of outputs and inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.model.formats._grouped import SCALE_DTYPES, require_dtype
from worker_svc.model.formats._scaled import Block, ScaledWeight, blocks, num_blocks
from worker_svc.model.formats._unread import UNREAD

_ALIAS = ".weight_scale_inv"  # a scale for each block is mostly called so, one for all of them sometimes


@dataclass(frozen=True, slots=True)
class Float8Format:
    """A `WeightFormat` of two tensors for each layer: `weight`, `weight_scale`."""

    block: Block

    def read_as(self, name: str) -> str | None:
        if name.endswith(UNREAD):
            return None
        return f"{name.removesuffix(_ALIAS)}.weight_scale" if name.endswith(_ALIAS) else name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        scales = num_blocks(outputs, self.block[0]), num_blocks(inputs, self.block[1])
        return {f"{layer}.weight": (outputs, inputs), f"{layer}.weight_scale": scales}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> ScaledWeight:
        """Scales of uint8 are powers of two, as those of float8_e8m0fnu."""
        codes, scales = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
        require_dtype(f"{layer}.weight", codes, torch.float8_e4m3fn)
        require_dtype(f"{layer}.weight_scale", scales, *SCALE_DTYPES, torch.float8_e8m0fnu, torch.uint8)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        outputs, inputs = codes.shape
        # In float32, as the formats' reference implementations compute, whatever the dtype of the scales
        scales = scales.float().view(num_blocks(outputs, self.block[0]), -1)
        return ScaledWeight(codes, scales, None, blocks(outputs, self.block[0]), blocks(inputs, self.block[1]))
