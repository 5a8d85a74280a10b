"""Weights of codes of e2m1, floating-point numbers of 4 bits, in groups of inputs with a scale: MXFP4 and NVFP4.

Source of the codes: the OCP Microscaling Formats Specification 1.0, section 5.3.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire_kernels.cpu.nibbles import E2M1_DOUBLES
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._grouped import SCALE_DTYPES, require_dtype
from worker_svc.model.formats._unread import UNREAD
from worker_svc.model.weight_format import BlockCodes, BlockForm

MX_GROUP = 32
"""Inputs that have one scale in MXFP4, a power of two."""
NV_GROUP = 16
"""Inputs that have one scale in NVFP4, in float8_e4m3fn; the weight has a factor besides."""


@dataclass(frozen=True, slots=True, eq=False)
class E2m1Weight:
    """A `StoredWeight`: each number is that of its code, times the scale of its group, times a factor."""

    layer: str
    codes: Tensor
    """uint8 [outputs, inputs / 2]: two in a byte, the lower one first."""
    scales: Tensor
    """float8_e8m0fnu or float8_e4m3fn [outputs, groups]."""
    group: int
    """How many neighbouring inputs are a group."""
    factor: Tensor | None = None
    """float32, one number. None: 1, and scales are powers of two."""

    @property
    def shape(self) -> tuple[int, int]:
        """Groups are whole: of a model whose inputs are no multiple of their size, the shape is another one."""
        return len(self.codes), self.scales.shape[1] * self.group

    def outputs(self, start: int, stop: int) -> "E2m1Weight":
        return self.strided(slice(start, stop))

    def strided(self, outputs: slice) -> "E2m1Weight":
        return replace(self, codes=self.codes[outputs], scales=self.scales[outputs])

    def inputs(self, start: int, stop: int) -> "E2m1Weight":
        if start % self.group or stop % self.group:
            raise UnsupportedModel(
                f"{self.layer}: groups of {self.group} inputs cannot be cut into inputs {start} to {stop}"
            )
        groups = slice(start // self.group, stop // self.group)
        return replace(self, codes=self.codes[:, start // 2 : stop // 2], scales=self.scales[:, groups])

    def dense(self) -> Tensor:
        """In float32, or without a factor in bfloat16, which holds each number exactly."""
        dtype = torch.bfloat16 if self.factor is None else torch.float32
        numbers = self._decoded(torch.tensor(E2M1_DOUBLES, dtype=dtype) / 2)
        scales = self.scales.float() if self.factor is None else self.scales.float() * self.factor
        return numbers.mul_(scales.to(dtype)[..., None]).flatten(1)

    def block_codes(self) -> BlockCodes:
        codes = self._decoded(torch.arange(16, dtype=torch.uint8)).flatten(1)
        factors = None if self.factor is None else self.factor.expand(len(codes))
        return BlockCodes(codes, 4, 0, self.scales.float() / 2, None, self.group, is_e2m1=True, factors=factors)

    def _decoded(self, of_codes: Tensor) -> Tensor:
        """What each code stands for, of 16, [outputs, groups, inputs of a group]."""
        codes, word = torch.arange(256), {1: torch.int16, 2: torch.int32, 4: torch.int64}[of_codes.itemsize]
        of_bytes = torch.stack((of_codes[codes % 16], of_codes[codes // 16]), 1).view(word).flatten()
        # By NumPy, which takes bytes as indices: a fifth of the time
        words = torch.from_numpy(np.ascontiguousarray(np.take(of_bytes.numpy(), self.codes.numpy())))
        return words.view(of_codes.dtype).view(*self.scales.shape, self.group)


@dataclass(frozen=True, slots=True)
class E2m1Format:
    """A `WeightFormat` of two or three tensors for each layer: `codes`, `weight_scale`, and in NVFP4 `factor`."""

    codes: str
    """The last part of the name of codes."""
    group: int
    factor: str | None = None
    """That of a number that scales are multiplied by. None: there is none, and scales are powers of two."""
    divides: bool = False
    """Whether scales are divided by it instead."""

    def read_as(self, name: str) -> str | None:
        return None if name.endswith(UNREAD) else name

    def block_form(self, layer: str) -> BlockForm:
        return BlockForm(4, self.group, is_e2m1=True)

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            f"{layer}.{self.codes}": (outputs, -(-inputs // 2)),
            f"{layer}.weight_scale": (outputs, -(-inputs // self.group)),
        }
        return shapes if self.factor is None else shapes | {f"{layer}.{self.factor}": (1,)}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> E2m1Weight:
        codes, scales = tensors[f"{layer}.{self.codes}"], tensors[f"{layer}.weight_scale"]
        require_dtype(f"{layer}.{self.codes}", codes, torch.uint8)
        if self.factor is None:
            require_dtype(f"{layer}.weight_scale", scales, torch.uint8, torch.float8_e8m0fnu)
            return E2m1Weight(layer, codes, scales.view(torch.float8_e8m0fnu), self.group)
        require_dtype(f"{layer}.weight_scale", scales, torch.float8_e4m3fn)
        factor = tensors[f"{layer}.{self.factor}"]
        require_dtype(f"{layer}.{self.factor}", factor, *SCALE_DTYPES)
        return E2m1Weight(layer, codes, scales, self.group, 1 / factor.float() if self.divides else factor.float())
