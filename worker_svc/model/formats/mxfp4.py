"""MXFP4: codes of 4 bits, floating-point numbers of the form e2m1, in groups of 32 inputs with a power of two as scale.

Source: the OCP Microscaling Formats Specification 1.0, section 5.3.3, and `_convert_moe_packed_tensors` of transformers
5.23, `transformers/integrations/mxfp4.py`. The experts of gpt-oss are published so; all other layers are dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire_kernels.cpu.nibbles import E2M1_DOUBLES
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._grouped import require_dtype
from worker_svc.model.weight_format import BlockCodes

STORED_ENDINGS = "_blocks", "_scales"
"""Last parts of the names of stored tensors: of codes, and of scales."""
_GROUP = 32  # inputs
_BYTES = _GROUP // 2


@dataclass(frozen=True, slots=True, eq=False)
class MxWeight:
    """A `StoredWeight` of groups."""

    layer: str
    blocks: Tensor
    """uint8 [outputs, groups, 16]: two codes in a byte, the lower one first."""
    scales: Tensor
    """float8_e8m0fnu [outputs, groups]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Groups are whole: of a model whose inputs are no multiple of 32, the size is another one."""
        return len(self.blocks), self.blocks.shape[1] * _GROUP

    def outputs(self, start: int, stop: int) -> "MxWeight":
        return self.strided(slice(start, stop))

    def strided(self, outputs: slice) -> "MxWeight":
        return replace(self, blocks=self.blocks[outputs], scales=self.scales[outputs])

    def inputs(self, start: int, stop: int) -> "MxWeight":
        if start % _GROUP or stop % _GROUP:
            raise UnsupportedModel(
                f"{self.layer}: groups of {_GROUP} inputs cannot be cut into inputs {start} to {stop}"
            )
        groups = slice(start // _GROUP, stop // _GROUP)
        return replace(self, blocks=self.blocks[:, groups], scales=self.scales[:, groups])

    def dense(self) -> Tensor:
        """In bfloat16, which holds each number exactly."""
        numbers = self._decoded(torch.tensor(E2M1_DOUBLES, dtype=torch.bfloat16) / 2)
        return numbers.mul_(self.scales.to(torch.bfloat16)[..., None]).flatten(1)

    def block_codes(self) -> BlockCodes:
        codes = self._decoded(torch.arange(16, dtype=torch.uint8)).flatten(1)
        return BlockCodes(codes, 4, 0, self.scales.float() / 2, None, _GROUP, is_e2m1=True)

    def _decoded(self, of_codes: Tensor) -> Tensor:
        """What each code stands for, of 16, [outputs, groups, 32]."""
        codes, word = torch.arange(256), torch.int16 if of_codes.itemsize == 1 else torch.int32
        of_bytes = torch.stack((of_codes[codes % 16], of_codes[codes // 16]), 1).view(word).flatten()
        # By NumPy, which takes bytes as indices: a fifth of the time
        words = torch.from_numpy(np.take(of_bytes.numpy(), self.blocks.numpy()))
        return words.view(of_codes.dtype)


class Mxfp4Format:
    """A `WeightFormat` of two tensors for each layer: `blocks` and `scales`."""

    def read_as(self, name: str) -> str | None:
        return name

    def has_blocks(self, layer: str) -> bool:
        return True

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        groups = -(-inputs // _GROUP)
        return {f"{layer}.blocks": (outputs, groups, _BYTES), f"{layer}.scales": (outputs, groups)}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> MxWeight:
        blocks, scales = tensors[f"{layer}.blocks"], tensors[f"{layer}.scales"]
        require_dtype(f"{layer}.blocks", blocks, torch.uint8)
        require_dtype(f"{layer}.scales", scales, torch.uint8, torch.float8_e8m0fnu)
        return MxWeight(layer, blocks, scales.view(torch.float8_e8m0fnu))


def _make(quantization: Mapping[str, Any]) -> Mxfp4Format:
    # The tensors themselves say which layers are quantized.
    Fields(quantization).names("modules_to_not_convert")
    return Mxfp4Format()


FORMAT = _make
